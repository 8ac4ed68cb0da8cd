"""The named cases: what is there, that each builds without memory, and that the kinds run."""

from __future__ import annotations

import gc
import subprocess
import sys
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from oomguard.errors import InputError
from oomguard.model.cases import CASES, Case, build_case, case_names, check_case
from oomguard.model.cases.optimizers import OPTIMIZERS
from oomguard.model.cases.registry import Training

# One of each kind of network, eager: what a compiled step costs is the compiler's time.
KINDS = [
    "llama-block-eager",
    "gpt-block-eager",
    "grouped-heads-eager",
    "mask-array-eager",
    "mask-window-eager",
    "mask-padding-eager",
    "alibi-eager",
    "attention-written-eager",
    "dropout-eager",
    "experts-dense-eager",
    "chunked-loss-eager",
    "nn-encoder-checkpoint-eager",
    "translator-eager",
    "lm-llama-lora-eager",
    "lm-llama-dora-eager",
    "lm-gemma3-eager",
    "lm-qwen3-moe-eager",
    "conv-plain-eager",
    "resnet-batchnorm-eager",
    "autoencoder-eager",
    "diffusion-eager",
    "conv-volume-eager",
    "fourier-eager",
    "rnn-eager",
    "mlp-eager",
    "vae-eager",
    "recommender-eager",
    "contrastive-eager",
    "distillation-eager",
    "scan-eager",
]
# These tests run on the reference BLAS.
SMALLER = {
    "transformer:language_model": {"layers": 2, "batch": 2, "seq": 32},
    "transformer:nn_encoder": {"batch": 2, "seq": 32},
    "transformer:translator": {"batch": 2, "seq": 32},
    "lm:language_model": {"batch": 1, "seq": 32},
    "vision:resnet": {"batch": 2},
    "vision:spectral": {"batch": 2},
    "dense:vae": {"batch": 64},
    "dense:contrastive": {"batch": 64},
    "dense:mlp": {"batch": 64},
}
NEEDED = {
    "rope": "llama-block",
    "grouped heads": "grouped-heads",
    "array mask": "mask-array",
    "no mask": "mask-none",
    "experts": "experts",
    "4-bit adapters": "lm-llama-qlora",
    "experts of mlx-lm": "lm-mixtral",
    "convolution": "conv-plain",
    "lstm": "lstm",
    "gru": "gru",
    "vision transformer": "vit",
    "adafactor": "optimizer-adafactor",
    "muon": "optimizer-muon",
    "lion": "optimizer-lion",
    "accumulation": "llama-block-accumulate",
    "bfloat16": "half-precision-bf16",
    "float16": "half-precision-fp16",
    "strides": "mlp-stride4",
    "attention alone": "llama-block-attention",
    "bare recompute": "llama-block-custom",
    "mlx-lm's checkpointing": "lm-llama-mlxlm",
}


def test_cases_are_many_and_named_alike() -> None:
    assert len(CASES) >= 150
    for name, case in CASES.items():
        assert case.name == name
        assert name == name.lower()
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
        assert case.about


@pytest.mark.parametrize("name", NEEDED.values(), ids=NEEDED)
def test_kind_of_step_that_must_be_there_is(name: str) -> None:
    check_case(name)


def test_no_two_cases_are_the_same_step() -> None:
    seen: dict[str, str] = {}
    for case in CASES.values():
        what = repr((case.network, sorted(case.options.items(), key=repr), case.training))
        assert what not in seen, f"{case.name} is {seen[what]}"
        seen[what] = case.name


def test_every_optimizer_is_in_a_case() -> None:
    assert {case.training.optimizer for case in CASES.values()} == set(OPTIMIZERS)


def test_names_are_listed_without_mlx() -> None:
    code = "import sys, oomguard.model.cases as c; c.case_names(); assert 'mlx' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_unknown_case_is_refused_with_near_names() -> None:
    with pytest.raises(InputError, match="unknown case 'llama-blok'; did you mean llama-block"):
        build_case("llama-blok")
    with pytest.raises(InputError, match="--list-cases"):
        check_case("zzzzzz")


def test_case_whose_package_is_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "mlx_lm" or name.startswith("mlx_lm.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "oomguard.model.cases.lm", raising=False)
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    with pytest.raises(InputError, match=r"case lm-llama needs mlx-lm: pip install 'oomguard\[lm\]'"):
        build_case("lm-llama")


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({case.network for case in CASES.values()}))
def test_case_built_unevaluated_takes_no_memory(family: str) -> None:
    for case in CASES.values():
        if case.network == family:
            gc.collect()
            before = mx.get_active_memory()
            step = case.build(evaluated=False)
            assert mx.get_active_memory() - before < 1 << 20, case.name
            assert step.compiled is None or case.training.compiled
            assert len(step.batch) == case.training.accumulate
            assert tree_flatten(step.model.trainable_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_case_of_each_kind_runs_and_its_weights_move(name: str) -> None:
    case = CASES[name]
    smaller = SMALLER.get(case.network, {})
    step = replace(case, options={**case.options, **smaller}).build()
    path, before = tree_flatten(step.model.trainable_parameters())[-1]
    before = mx.array(before)
    loss = step.run()
    values = [float(value.sum()) for _, value in tree_flatten([loss])]
    assert all(mx.isfinite(mx.array(values)).tolist())
    after = dict(tree_flatten(step.model.trainable_parameters()))[path]
    assert not mx.array_equal(before, after)


def built(training: Training, name: str = "llama-block") -> tuple[float, dict[str, mx.array]]:
    """Loss and weights after two updates of a smaller case with another training."""
    options = {
        **CASES[name].options,
        "batch": 2,
        "seq": 32,
        "width": 64,
        "heads": 4,
        "kv_heads": 2,
        "hidden": 96,
    }
    step = replace(CASES[name], options=options, training=training).build()
    for _ in range(2):
        loss = step.run()
    return float(loss), dict(tree_flatten(step.model.trainable_parameters()))


@pytest.mark.parametrize(
    "training",
    [
        Training(compiled=False),
        Training(compiled=False, checkpoint="every"),
        Training(compiled=False, checkpoint="stride=2"),
        Training(compiled=False, checkpoint="attention"),
        Training(compiled=False, checkpoint="custom_function"),
        Training(compiled=False, checkpoint="mlx-lm"),
    ],
    ids=lambda training: str(training.changes()),
)
def test_how_a_case_is_run_does_not_change_what_it_learns(training: Training) -> None:
    loss, weights = built(Training(optimizer="sgd"))
    other_loss, other = built(replace(training, optimizer="sgd"))
    assert other_loss == pytest.approx(loss, rel=1e-4)
    for path, weight in weights.items():
        assert mx.allclose(weight, other[path], rtol=1e-3, atol=1e-5), path


def test_accumulation_in_one_graph_learns_what_evaluated_micro_steps_do() -> None:
    training = Training(optimizer="sgd", compiled=False, accumulate=3)
    _, evaluated = built(training)
    _, together = built(replace(training, evaluate_micro_steps=False))
    for path, weight in evaluated.items():
        assert mx.allclose(weight, together[path], rtol=1e-3, atol=1e-5), path


def test_case_is_the_same_for_the_same_seed() -> None:
    first, second = (build_case("mlp-eager", seed=3) for _ in range(2))
    for (path, a), (_, b) in zip(
        tree_flatten(first.model.parameters()), tree_flatten(second.model.parameters()), strict=True
    ):
        assert mx.array_equal(a, b), path
    assert mx.array_equal(first.batch[0][0], second.batch[0][0])


def test_checkpointing_of_mlx_lm_stays_within_its_case() -> None:
    from mlx_lm.models import llama

    before = llama.TransformerBlock.__call__
    step = build_case("lm-llama-mlxlm", evaluated=False)
    assert llama.TransformerBlock.__call__ is before
    assert type(step.layers[0]).__call__ is not before
    assert isinstance(step.layers[0], llama.TransformerBlock)


def test_half_precision_reaches_weights_and_inputs() -> None:
    step = build_case("mlp-bf16", evaluated=False)
    assert {value.dtype for _, value in tree_flatten(step.model.parameters())} == {mx.bfloat16}
    assert step.batch[0][0].dtype == mx.bfloat16


def test_adapters_alone_are_trained_and_stay_in_single_precision() -> None:
    step = build_case("lm-llama-qlora-bf16", evaluated=False)
    trained = dict(tree_flatten(step.model.trainable_parameters()))
    assert trained
    assert all(path.rsplit(".", 1)[1] in ("lora_a", "lora_b") for path in trained)
    assert {value.dtype for value in trained.values()} == {mx.float32}
    linear = [module for module in step.model.modules() if isinstance(module, nn.QuantizedLinear)]
    assert linear
    assert all(module.bits == 4 for module in linear)


def test_running_statistics_of_batch_norm_are_part_of_the_state() -> None:
    step = build_case("resnet-batchnorm-eager")
    before = mx.array(step.model.layers[0].norm1.running_mean)
    step.run()
    assert not mx.array_equal(before, step.model.layers[0].norm1.running_mean)


def test_network_without_layers_refuses_a_policy() -> None:
    case = Case("x", "x", "recurrent:recurrent", {"seq": 2}, Training(checkpoint="every"))
    with pytest.raises(InputError, match="has no list of layers to checkpoint"):
        case.build(evaluated=False)


def test_sweep_lists_every_case_once() -> None:
    assert len(set(case_names())) == len(case_names()) == len(CASES)
