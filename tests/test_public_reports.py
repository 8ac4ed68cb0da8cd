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
    understood,
)
from oomguard.errors import InputError

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
