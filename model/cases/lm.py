"""mlx-lm's models, adapters, loss and checkpointing on shapes small enough to run anywhere."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.trainer import default_loss
from mlx_lm.tuner.utils import linear_to_lora_layers

from oomguard.model.cases.step import MicroBatch, Network

COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 32.0},
    "gemma3_text": {"query_pre_attn_scalar": 32.0, "sliding_window": 64, "sliding_window_pattern": 2},
    "phi3": {},
    "olmo2": {},
    "gpt2": {
        "n_ctx": 1024,
        "n_embd": 256,
        "n_head": 8,
        "n_layer": 4,
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    },
    "mamba": {
        "state_size": 8,
        "intermediate_size": 256,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 8,
    },
}


def language_model(
    dtype: mx.Dtype,
    family: str = "llama",
    batch: int = 4,
    seq: int = 128,
    tune: str = "full",
    bits: int = 0,
    rank: int = 8,
    adapted_layers: int = 16,
    dropout: float = 0.0,
    keys: list[str] | None = None,
    **shape: Any,
) -> Network:
    """One of mlx-lm's models, trained as its trainer does.

    Args:
        dtype: of the model; adapters are float32, as mlx-lm makes them.
        family: a module of ``mlx_lm.models``.
        tune: ``full``, ``lora`` or ``dora``.
        bits: quantized weights (4 or 8) in groups of 64; 0 for none.
        adapted_layers: layers from the last that get adapters.
        keys: modules that get adapters; None: mlx-lm's choice, every linear layer of a block.
        **shape: changes to the family's configuration.
    """
    module = importlib.import_module(f"mlx_lm.models.{family}")
    config = {**COMMON, **FAMILIES[family], **shape, "model_type": family}
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    if bits:
        nn.quantize(model, group_size=64, bits=bits)
    if tune != "full":
        model.freeze()
        adapters = {"rank": rank, "scale": 20.0, "dropout": dropout} | (
            {} if keys is None else {"keys": keys}
        )
        linear_to_lora_layers(model, adapted_layers, adapters, use_dora=tune == "dora")
    vocab = int(config["vocab_size"])

    def loss(tokens: mx.array, lengths: mx.array) -> tuple[mx.array, mx.array]:
        value, counted = default_loss(model, tokens, lengths)
        return value, counted

    def draw_batch(key: mx.array) -> MicroBatch:
        tokens = mx.random.randint(0, vocab, (batch, seq + 1), key=key)
        return tokens, mx.array([[0, seq - i % 3] for i in range(batch)])

    return Network(model, loss, draw_batch, list(model.layers), cast=False)
