"""The cases. A base network has variants, named by what they change: ``attention-causal-eager``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from oomguard.model.cases.registry import Case, Training

USUAL = Training()
VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {"compiled": False},
    "every": {"checkpoint": "every"},
    "every-eager": {"checkpoint": "every", "compiled": False},
    "attention": {"checkpoint": "attention"},
    "attention-eager": {"checkpoint": "attention", "compiled": False},
    "stride2": {"checkpoint": "stride=2"},
    "stride4": {"checkpoint": "stride=4"},
    "stride4-eager": {"checkpoint": "stride=4", "compiled": False},
    "blocks2": {"checkpoint": "blocks=2"},
    "blocks2-eager": {"checkpoint": "blocks=2", "compiled": False},
    "custom": {"checkpoint": "custom_function"},
    "mlxlm": {"checkpoint": "mlx-lm"},
    "mlxlm-eager": {"checkpoint": "mlx-lm", "compiled": False},
    "bf16": {"dtype": "bfloat16"},
    "bf16-eager": {"dtype": "bfloat16", "compiled": False},
    "bf16-every": {"dtype": "bfloat16", "checkpoint": "every"},
    "fp16": {"dtype": "float16", "optimizer": "sgd-momentum"},
    "accumulate": {"accumulate": 3},
    "accumulate-eager": {"accumulate": 3, "compiled": False},
    "one-graph": {"accumulate": 3, "evaluate_micro_steps": False},
    "clip": {"clip_norm": True},
}


def _cases(
    name: str,
    about: str,
    network: str,
    variants: str = "eager",
    needs: str = "",
    training: Training = USUAL,
    **options: Any,
) -> Iterator[Case]:
    """A base case, compiled in float32 with AdamW unless ``training`` says otherwise, and its variants."""
    yield Case(name, about, network, options, training, needs)
    for variant in variants.split():
        changed = replace(training, **VARIANTS[variant])
        what = ", ".join(f"{key} {value}" for key, value in VARIANTS[variant].items())
        yield Case(f"{name}-{variant}", f"{about}; {what}", network, options, changed, needs)


def _transformers() -> Iterator[Case]:
    stack = "transformer:language_model"
    yield from _cases(
        "llama-block",
        "RoPE, RMS norm, SwiGLU, causal attention",
        stack,
        "eager every every-eager attention attention-eager stride2 blocks2 blocks2-eager custom "
        "accumulate accumulate-eager one-graph clip",
    )
    yield from _cases(
        "gpt-block",
        "learned positions, layer norm, GELU, biases, tied head",
        stack,
        "eager every attention accumulate",
        positions="learned",
        norm="layer",
        feed="gelu",
        bias=True,
        tied=True,
    )
    yield from _cases(
        "grouped-heads", "8 heads on 2 keys and values", stack, "eager every", heads=8, kv_heads=2
    )
    yield from _cases(
        "half-precision",
        "few tokens, as half precision is slow on a CPU",
        stack,
        "bf16 bf16-eager bf16-every fp16",
        batch=2,
        seq=96,
    )
    yield from _cases("one-kv-head", "8 heads on a single key and value", stack, heads=8, kv_heads=1)
    yield from _cases("mask-array", "additive causal mask", stack, "eager every attention", mask="array")
    yield from _cases("mask-bool", "boolean causal mask", stack, "eager every", mask="bool")
    yield from _cases("mask-window", "boolean sliding window", stack, "eager", mask="window")
    yield from _cases(
        "mask-padding", "boolean padding mask from lengths", stack, "eager every", mask="padding"
    )
    yield from _cases("mask-none", "attention in both directions", stack, "eager", mask="none")
    yield from _cases("alibi", "a bias a head in place of positions", stack, "eager", positions="alibi")
    yield from _cases(
        "attention-written",
        "matmul, softmax, matmul",
        stack,
        "eager every",
        core="written",
        mask="array",
        kv_heads=3,
    )
    yield from _cases("softcap", "tanh on the scores", stack, "eager", core="softcap", mask="array")
    yield from _cases("qk-norm", "RMS norm of queries and keys", stack, "eager", qk_norm=True, kv_heads=2)
    yield from _cases("rope-traditional", "RoPE on neighbours", stack, "", positions="rope-traditional")
    yield from _cases(
        "sinusoidal", "fixed positions", stack, "", positions="sinusoidal", norm="layer", feed="relu2"
    )
    yield from _cases(
        "rms-written", "RMS norm from elementwise operations", stack, "eager", norm="rms-written"
    )
    yield from _cases("gelu-approx", "approximate GELU", stack, "", feed="gelu-approx", norm="layer")
    yield from _cases(
        "parallel-block", "attention beside feed-forward", stack, "eager", parallel=True, feed="gelu"
    )
    yield from _cases("dropout", "dropout in every block", stack, "eager every", dropout=0.1)
    yield from _cases(
        "experts",
        "best two of four experts, gathered",
        stack,
        "eager every",
        feed="experts",
        hidden=256,
        batch=1,
        seq=48,
    )
    yield from _cases(
        "experts-dense", "four experts, all used", stack, "eager every", feed="experts-dense", hidden=256
    )
    yield from _cases(
        "long-context", "one sequence of 768 tokens", stack, "eager attention", batch=1, seq=768, layers=3
    )
    yield from _cases(
        "wide-vocabulary", "logits are the largest tensor", stack, "eager", vocab=8000, layers=2, seq=128
    )
    yield from _cases(
        "chunked-loss",
        "cross-entropy in four parts",
        stack,
        "eager",
        vocab=8000,
        layers=2,
        seq=128,
        loss_chunks=4,
    )
    yield from _cases("nn-encoder", "mlx.nn encoder", "transformer:nn_encoder", "eager every")
    yield from _cases(
        "nn-encoder-checkpoint",
        "mlx.nn encoder with its own checkpointing",
        "transformer:nn_encoder",
        checkpoint=True,
    )
    yield from _cases(
        "nn-encoder-dropout", "mlx.nn encoder, dropout", "transformer:nn_encoder", "eager", dropout=0.1
    )
    yield from _cases("translator", "mlx.nn encoder and decoder, cross-attention", "transformer:translator")


def _optimizers() -> Iterator[Case]:
    for name in (
        "sgd",
        "sgd-momentum",
        "sgd-nesterov",
        "rmsprop",
        "adagrad",
        "adadelta",
        "adam",
        "adam-corrected",
        "adamw-schedule",
        "adamax",
        "lion",
        "adafactor",
        "adafactor-momentum",
        "muon",
    ):
        variants = "eager" if name in ("adam", "lion", "adafactor", "muon", "sgd-momentum") else ""
        # Few tokens on wide layers, so that the update and not the backward is the peak.
        yield from _cases(
            f"optimizer-{name}",
            f"{name} on wide layers and few tokens",
            "transformer:language_model",
            variants,
            training=Training(optimizer=name),
            layers=2,
            width=384,
            hidden=1536,
            batch=1,
            seq=64,
        )


def _language_models() -> Iterator[Case]:
    lm, needs = "lm:language_model", "mlx_lm"
    half = Training(dtype="bfloat16", optimizer="adam")
    # Quantized products are slow on a CPU, in bfloat16 most of all.
    narrow: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 16}
    narrower: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 8}

    def of(
        name: str, about: str, variants: str, training: Training = USUAL, **options: Any
    ) -> Iterator[Case]:
        return _cases(name, f"mlx-lm {about}", lm, variants, needs, training, **options)

    yield from of(
        "lm-llama", "Llama, all weights", "eager mlxlm mlxlm-eager every accumulate", family="llama"
    )
    yield from of("lm-llama-lora", "Llama, LoRA", "eager mlxlm every stride2", family="llama", tune="lora")
    yield from of(
        "lm-llama-qlora",
        "Llama, 4-bit, LoRA",
        "eager mlxlm mlxlm-eager every blocks2",
        family="llama",
        tune="lora",
        bits=4,
        **narrow,
    )
    yield from of("lm-llama-qlora8", "Llama, 8-bit, LoRA", "", family="llama", tune="lora", bits=8, **narrow)
    yield from of(
        "lm-llama-qlora-bf16",
        "Llama, 4-bit in bfloat16, LoRA",
        "mlxlm",
        half,
        family="llama",
        tune="lora",
        bits=4,
        **narrower,
    )
    yield from of("lm-llama-dora", "Llama, DoRA", "eager", family="llama", tune="dora")
    yield from of(
        "lm-llama-lora-last2",
        "Llama, LoRA on the last two layers",
        "",
        family="llama",
        tune="lora",
        adapted_layers=2,
    )
    yield from of(
        "lm-llama-lora-dropout", "Llama, LoRA with dropout", "", family="llama", tune="lora", dropout=0.05
    )
    yield from of(
        "lm-llama-lora-qv",
        "Llama, LoRA on queries and values",
        "",
        family="llama",
        tune="lora",
        keys=["self_attn.q_proj", "self_attn.v_proj"],
    )
    yield from of("lm-qwen2", "Qwen2, all weights", "eager", family="qwen2")
    yield from of(
        "lm-qwen2-qlora", "Qwen2, 4-bit, LoRA", "mlxlm", family="qwen2", tune="lora", bits=4, **narrow
    )
    yield from of("lm-qwen3", "Qwen3, all weights", "eager mlxlm", family="qwen3")
    yield from of(
        "lm-qwen3-qlora", "Qwen3, 4-bit, LoRA", "eager mlxlm", family="qwen3", tune="lora", bits=4, **narrow
    )
    yield from of("lm-gemma", "Gemma, all weights", "eager", family="gemma")
    yield from of("lm-gemma2-lora", "Gemma 2, LoRA, capped scores", "eager", family="gemma2", tune="lora")
    yield from of(
        "lm-gemma3", "Gemma 3, window and global layers", "eager mlxlm", family="gemma3_text", seq=160
    )
    yield from of("lm-phi3-lora", "Phi-3, joined projections, LoRA", "eager", family="phi3", tune="lora")
    yield from of("lm-olmo2", "OLMo 2, norms after", "", family="olmo2")
    yield from of("lm-gpt2", "GPT-2", "eager", family="gpt2")
    yield from of("lm-mixtral", "Mixtral, all weights", "eager mlxlm", family="mixtral")
    yield from of(
        "lm-mixtral-qlora", "Mixtral, 4-bit, LoRA", "", family="mixtral", tune="lora", bits=4, **narrow
    )
    yield from of("lm-qwen3-moe", "Qwen3 MoE, all weights", "eager", family="qwen3_moe")
    yield from of(
        "lm-qwen3-moe-qlora",
        "Qwen3 MoE, 4-bit, LoRA",
        "eager mlxlm",
        family="qwen3_moe",
        tune="lora",
        bits=4,
        **narrow,
    )
    yield from of("lm-mamba", "Mamba, a scan over the sequence", "", family="mamba", batch=4, seq=48)


def _vision() -> Iterator[Case]:
    yield from _cases("conv-plain", "convolution, ReLU, max pooling", "vision:plain", "eager accumulate")
    yield from _cases(
        "conv-average", "convolution, ReLU, average pooling", "vision:plain", "", pool="average"
    )
    yield from _cases("resnet-batchnorm", "residual blocks, batch norm", "vision:resnet", "eager")
    yield from _cases(
        "resnet-groupnorm", "residual blocks, group norm", "vision:resnet", "eager every", norm="group"
    )
    yield from _cases(
        "resnet-instancenorm", "residual blocks, instance norm", "vision:resnet", "", norm="instance"
    )
    yield from _cases("convnext", "depthwise convolution", "vision:convnext", "eager every")
    yield from _cases("autoencoder", "transposed convolutions", "vision:autoencoder", "eager")
    yield from _cases("diffusion", "a small U-Net denoising", "vision:diffusion", "eager")
    yield from _cases("vit", "vision transformer", "vision:vit", "eager every stride2 attention")
    yield from _cases("conv-temporal", "dilated 1-D convolutions", "vision:temporal", "eager every")
    yield from _cases("conv-volume", "3-D convolutions", "vision:volume", "eager")
    yield from _cases("fourier", "Fourier mixing", "vision:spectral", "eager")


def _recurrent() -> Iterator[Case]:
    network = "recurrent:recurrent"
    yield from _cases("lstm", "two LSTM layers", network, "eager bf16", kind="lstm")
    yield from _cases("gru", "two GRU layers", network, "eager", kind="gru")
    yield from _cases("rnn", "two Elman layers", network, "eager", kind="rnn")
    yield from _cases(
        "lstm-both-ways", "LSTM in both directions", network, "eager", kind="lstm", both_ways=True, layers=1
    )


def _dense() -> Iterator[Case]:
    yield from _cases(
        "mlp",
        "16 dense layers, ReLU",
        "dense:mlp",
        "eager every every-eager stride2 stride4 stride4-eager blocks2 custom bf16 fp16 "
        "accumulate one-graph clip",
    )
    yield from _cases(
        "mlp-gelu", "dense layers, GELU, layer norm", "dense:mlp", "eager", activation="gelu", norm=True
    )
    yield from _cases(
        "mlp-tanh-dropout",
        "dense layers, tanh, dropout",
        "dense:mlp",
        "eager",
        activation="tanh",
        dropout=0.2,
    )
    yield from _cases(
        "mlp-softplus", "dense layers, softplus", "dense:mlp", "", activation="softplus", depth=8
    )
    yield from _cases("mixer", "MLP-Mixer", "dense:mixer", "eager every")
    yield from _cases("vae", "variational autoencoder", "dense:vae", "eager")
    yield from _cases("recommender", "large embeddings", "dense:recommender", "eager")
    yield from _cases("contrastive", "two towers", "dense:contrastive", "eager")
    yield from _cases("distillation", "a frozen teacher", "dense:distillation", "eager")
    yield from _cases("scan", "cumulative sums and a sort", "dense:scan", "eager")


def _all_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for family in (_transformers, _optimizers, _language_models, _vision, _recurrent, _dense):
        for case in family():
            if case.name in cases:
                raise ValueError(f"two cases are named {case.name}")
            cases[case.name] = case
    return cases


CASES = _all_cases()
