"""How a published peak is read: what it says, mlx-lm's defaults of its date, and None where a length is a guess."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlx.utils import tree_flatten

from oomguard.calibration.public import (
    ARCHITECTURES,
    QUERY_VALUE,
    PublicRow,
    build_lora_step,
    build_model,
    main,
    predict,
    predicted_bytes,
    understood,
)
from oomguard.calibration.public_rows import (
    MORE_ROWS,
    ROWS,
    OpRow,
    ScratchRow,
    all_public_rows,
    read_public_rows,
    read_published,
)
from oomguard.calibration.scratch_gpt import ScratchGPT
from oomguard.errors import InputError
from oomguard.units import GIB

REPORT: dict[str, Any] = {
    "id": "X1", "model": "Qwen3-0.6B-4bit", "arch": "qwen3-0.6b", "layers": 4, "batch": 2, "actual_T": 64,
    "ckpt": False, "peak_gb": 1.0, "machine": "M4 Max 64GB", "version": "mlx 0.31.1",
}  # fmt: skip
WITHOUT_SHAPE = {"gemma-4-e4b"}


def read(**changes: Any) -> PublicRow:
    found = understood({**REPORT, **changes})
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("said", "tokens"),
    [
        ({"actual_T": 1024}, 1024),
        ({"actual_T": "truncated at 1024 (longest 1934)", "max_seq": 1024}, 1023),
        ({"actual_T": "<=2048", "max_seq": 2048}, 2047),
        ({"actual_T": None, "max_seq": 512}, 511),
        ({"actual_T": "about 1000"}, None),
        ({"actual_T": "129 loss tokens, mask_prompt", "max_seq": 512}, None),
        ({"actual_T": None}, None),
    ],
)
def test_length_is_taken_only_where_it_is_stated(said: dict[str, Any], tokens: int | None) -> None:
    found = understood({**REPORT, **said})
    assert (found.tokens if found else None) == tokens


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ("4-bit g64", (4, 64)),
        ("8bit, group 32", (8, 32)),
        ("none bf16", (None, 64)),
        ("4-bit (4.501 bpw)", (4, 64)),
    ],
)
def test_quantization_is_read(quantization: str, expected: tuple[int | None, int]) -> None:
    found = read(quant=quantization)
    assert (found.bits, found.group_size) == expected


@pytest.mark.parametrize(
    ("keys", "version", "expected"),
    [
        ("q,v (1.704M)", "2026-03", QUERY_VALUE),
        ("all linears", "2025-06", None),
        ("", "2025-06", QUERY_VALUE),
        ("", "2025-10-02", None),
        ("", "", None),
    ],
)
def test_keys_not_given_are_the_default_of_the_date(
    keys: str, version: str, expected: tuple[str, ...] | None
) -> None:
    assert read(keys=keys, version=version).keys == expected


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("mlx 0.31.2-0.32.0, unfused", (0, 31, 2)),
        ("2025-06", (0, 26, 0)),
        ("2026-04-01", (0, 31, 2)),
        ("2023-12", (0, 31, 2)),
        ("", (0, 31, 2)),
    ],
)
def test_release_is_the_one_named_or_that_of_the_date(version: str, release: tuple[int, int, int]) -> None:
    assert read(version=version).mlx == release


def test_mistakes_are_named() -> None:
    with pytest.raises(InputError, match="way to fine-tune"):
        read(ft="prompt tuning")
    with pytest.raises(InputError, match="did you mean adam"):
        build_lora_step(read(optimizer="adamm"))
    with pytest.raises(InputError, match="no shape is known"):
        build_model(read(arch="qwen9-1t"))


def test_what_is_trained_follows_the_method() -> None:
    trained = {
        method: {
            name
            for name, _ in tree_flatten(
                build_model(read(ft=method, quant="none bf16")).trainable_parameters()
            )
        }
        for method in ("lora", "dora", "full, num_layers 4")
    }
    lora, dora, full = trained.values()
    assert all(name.endswith(("lora_a", "lora_b")) for name in lora)
    assert {name for name in dora if name.endswith(".m")}
    assert not any("lora" in name for name in full)
    assert {name.split(".")[2] for name in full} == {"24", "25", "26", "27"}
    everything = build_model(read(ft="full", quant="none bf16", layers=-1)).trainable_parameters()
    assert len({name.split(".")[2] for name, _ in tree_flatten(everything)}) == 28


def test_a_row_says_accumulation_evaluation_and_no_compilation() -> None:
    plain = read(actual_T=32)
    accumulated, evaluated = read(actual_T=32, accumulate=3), read(actual_T=32, evalB=64)
    eager = read(actual_T=32, compiled=False)
    assert (accumulated.accumulate, evaluated.evaluation_batch, eager.compiled) == (3, 64, False)
    peaks = [predict(row).peak_bytes for row in (plain, accumulated, evaluated, eager)]
    assert peaks[1] > peaks[0]  # the gradients of the micro-batches before
    assert peaks[2] > 2 * peaks[0]  # 64 sequences of logits
    assert peaks[3] != peaks[0]
    assert not predict(eager).compiled


def test_at_most_so_many_tokens_is_a_bound_and_no_estimate() -> None:
    found = read(actual_T="at most 2048")
    assert (found.tokens, found.at_most) == (2048, True)
    assert not read(actual_T=2048).at_most


@pytest.mark.parametrize(
    ("said", "limit_bytes"),
    [
        ({"machine": "M1 Max 32GB"}, int(0.95 * 32 * GIB)),
        ({"machine": "M1 Max", "ram_gb": 64}, int(0.95 * 64 * GIB)),
        ({"machine": "M1 Max 32GB", "memory_limit": "24GB"}, 24 * 10**9),
        ({"machine": "M1 Max", "ram_gb": "unstated"}, None),
    ],
)
def test_memory_limit_is_the_one_set_or_that_of_the_machine(said: dict[str, Any], limit_bytes: int) -> None:
    found = read(**said)
    assert found.memory_limit == found.device.memory_limit == limit_bytes


def test_fused_parts_are_said_one_by_one() -> None:
    found = read(attention="fused", cross_entropy="decomposed")
    assert (found.fused_attention, found.fused_cross_entropy) == (True, False)
    assert (read().fused_attention, read().fused_cross_entropy) == (None, None)
    with pytest.raises(InputError, match="neither fused nor decomposed"):
        read(attention="flash")


@pytest.mark.parametrize(
    ("unit", "expected"),
    [("GB", 1_500_000_000), ("GiB", 3 << 29), ("MiB", 3 << 19), ("GiB above inputs", 3 << 29)],
)
def test_reported_figure_has_its_unit(unit: str, expected: int) -> None:
    found = read(reported=1.5, unit=unit)
    assert (found.peak_bytes, found.above_inputs) == (expected, "above" in unit)


OP = {
    "id": "O1", "kind": "op", "model": "fast attention fwd+bwd", "note": "32/8 heads x128", "batch": 1,
    "actual_T": 16, "reported": 1.0, "unit": "GiB above inputs", "machine": "M1 Max 32GB", "version": "mlx 0.32.4",
}  # fmt: skip


def test_arguments_of_an_operation_count_only_where_they_did() -> None:
    above, whole = read_published(OP), read_published({**OP, "unit": "GiB"})
    assert isinstance(above, OpRow)
    assert isinstance(whole, OpRow)
    inputs = sum(array.nbytes for array in above.build()[1])
    result = predict(above)
    assert predicted_bytes(whole, result) - predicted_bytes(above, result) == inputs


def test_an_operation_of_no_known_name_is_refused() -> None:
    with pytest.raises(InputError, match="known are attention"):
        read_published({**OP, "model": "conv", "note": ""})
    with pytest.raises(InputError, match="does not say"):
        read_published({**OP, "note": ""})


def test_a_run_from_scratch_is_the_scripts_model_where_its_report_is_silent() -> None:
    row = {
        "id": "G1", "kind": "from-scratch", "model": "SiLU MLPx3", "reported": 1.0, "unit": "GiB", "batch": 8,
        "vocab": 8192, "actual_T": 2048, "version": "mlx 0.31.0",
    }  # fmt: skip
    found = read_published(row)
    assert isinstance(found, ScratchRow)
    config = found.config
    assert (config.depth, config.dim, config.mlp, config.activation) == (4, 256, 3, "silu")
    assert (config.logit_cap, found.accumulate, found.evaluation_batch) == (False, 4, None)
    named = read_published(
        {**row, "model": "GPT depth6 dim384 MLPx2 relu2, logit cap", "accumulate": 1, "evalB": 32}
    )
    assert isinstance(named, ScratchRow)
    assert (named.config.depth, named.config.dim, named.config.mlp) == (6, 384, 2)
    assert (named.config.logit_cap, named.accumulate, named.evaluation_batch) == (True, 1, 32)


def test_parameters_of_runs_from_scratch_are_those_reported() -> None:
    for row in read_public_rows(MORE_ROWS):
        if "params_M" in row:
            found = read_published(row)
            assert isinstance(found, ScratchRow)
            flat = tree_flatten(ScratchGPT(found.config).parameters())
            assert round(sum(array.size for _, array in flat) / 1e6, 1) == row["params_M"], row["id"]


def test_every_shipped_row_says_where_it_is_from() -> None:
    rows = all_public_rows()
    assert len({row["id"] for row in rows}) == len(rows)
    assert all(row["source"] and row["model"] for row in rows)
    assert all(row["version"] and row["machine"] for row in read_public_rows(MORE_ROWS))
    assert len(rows) == len(read_public_rows(ROWS)) + len(read_public_rows(MORE_ROWS))


def test_rows_of_a_file_are_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "reports.jsonl"
    file.write_text("\n".join(json.dumps({**REPORT, "id": name}) for name in ("X1", "X2")) + "\n")
    main([str(file), "X2"])
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2
    assert shown[0].startswith("X2")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted(set(json.loads(ARCHITECTURES.read_text())) - WITHOUT_SHAPE))
def test_every_architecture_is_traced_without_an_unknown_primitive(architecture: str) -> None:
    row = read(arch=architecture, actual_T=32)
    plain, every = predict(row), predict(replace(row, recompute=True))
    assert plain.unknown == {}
    assert plain.warnings == []
    assert every.graph_peak_bytes <= plain.graph_peak_bytes
    assert plain.peak_bytes > plain.state_bytes
