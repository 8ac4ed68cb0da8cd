"""The byte-level GPT every preset is a shape of.

Pre-LayerNorm, GELU MLP, biases on every Linear, learned absolute positions, the head tied to the token
embedding. It is written with the layers people use (``mlx.nn``, ``mx.fast``), so that what it peaks at is
what theirs does. No checkpointing in here: ``checkpoint_layers(model.blocks, policy)`` adds it.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from oomguard.config.model import ModelConfig

INIT_STD = 0.02


def attention_core(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Scores, causal mask, softmax and the product with the values.

    All that is quadratic in the sequence length is in here, which is why the ``attention`` policy recomputes
    only this. Arguments and result: (batch, heads, tokens, head_dim).
    """
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask="causal")


def dropout(x: mx.array, rate: float, key: mx.array | None) -> mx.array:
    """Zeroes elements with probability ``rate`` and scales up the rest; no key, no dropout.

    The key is an argument, not the global random state, so that a recompute draws the same mask.
    """
    if key is None:
        return x
    kept = mx.random.bernoulli(1 - rate, x.shape, key=key)
    return (kept * x) * (1 / (1 - rate))


class Attention(nn.Module):
    """Causal self-attention with four biased projections."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.n_heads = config.n_heads
        self.scale = config.head_dim**-0.5
        self.query = nn.Linear(config.d_model, config.d_model)
        self.key = nn.Linear(config.d_model, config.d_model)
        self.value = nn.Linear(config.d_model, config.d_model)
        self.out = nn.Linear(config.d_model, config.d_model)

    def __call__(self, x: mx.array) -> mx.array:
        """(batch, tokens, d_model) to the same shape."""
        queries, keys, values = (self._heads(project(x)) for project in (self.query, self.key, self.value))
        mixed = attention_core(queries, keys, values, self.scale)
        return self.out(mixed.transpose(0, 2, 1, 3).reshape(x.shape))

    def _heads(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:2], self.n_heads, -1).transpose(0, 2, 1, 3)


class MLP(nn.Module):
    """Two biased projections with the exact GELU between them."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.up = nn.Linear(config.d_model, config.d_mlp)
        self.down = nn.Linear(config.d_mlp, config.d_model)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down(nn.gelu(self.up(x)))


class Block(nn.Module):
    """One pre-norm transformer block; dropout falls on what each half adds to the stream."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.dropout_rate = config.dropout
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.d_model)
        self.mlp = MLP(config)

    def __call__(self, x: mx.array, keys: mx.array | None = None) -> mx.array:
        """(batch, tokens, d_model) to the same shape; ``keys`` are its two dropouts' random keys, (2, 2)."""
        attention_key, mlp_key = (None, None) if keys is None else (keys[0], keys[1])
        x = x + dropout(self.attention(self.attention_norm(x)), self.dropout_rate, attention_key)
        return x + dropout(self.mlp(self.mlp_norm(x)), self.dropout_rate, mlp_key)


class GPT(nn.Module):
    """The model of a ``ModelConfig``; its parameter count is ``config.params``.

    Nothing is evaluated here: a GPT of any size costs no memory until its parameters are.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.dropout_rate = config.dropout
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.context, config.d_model)
        self.blocks = [Block(config) for _ in range(config.n_layers)]
        self.norm = nn.LayerNorm(config.d_model)
        self._initialize()

    def __call__(self, tokens: mx.array) -> mx.array:
        """Logits of the next token.

        Args:
            tokens: (batch, tokens), integers below ``vocab_size``; at most ``context`` tokens.

        Returns:
            (batch, tokens, vocab_size), in the parameters' dtype.
        """
        x = self.tokens(tokens) + self.positions(mx.arange(tokens.shape[1]))
        keys = self._dropout_keys()
        x = dropout(x, self.dropout_rate, None if keys is None else keys[0, 0])
        for i, block in enumerate(self.blocks, start=1):
            x = block(x) if keys is None else block(x, keys[i])
        logits: mx.array = self.tokens.as_linear(self.norm(x))
        return logits

    def _dropout_keys(self) -> mx.array | None:
        """Two keys for the embeddings (one is used) and for each block, (1 + n_layers, 2, 2)."""
        if not self.training or self.dropout_rate == 0:
            return None
        return mx.random.randint(0, 2**32 - 1, (1 + len(self.blocks), 2, 2), dtype=mx.uint32)

    def _initialize(self) -> None:
        """GPT-2's start: normal weights, zero biases, what feeds the stream scaled by its 2 L additions.

        Source: Radford et al. 2019, section 2.3.
        """
        residual_std = INIT_STD / (2 * len(self.blocks)) ** 0.5
        for embedding in (self.tokens, self.positions):
            embedding.weight = INIT_STD * mx.random.normal(embedding.weight.shape)
        for block in self.blocks:
            for name, module in block.named_modules():
                if isinstance(module, nn.Linear):
                    std = residual_std if name in ("attention.out", "mlp.down") else INIT_STD
                    module.weight = std * mx.random.normal(module.weight.shape)
                    module.bias = mx.zeros_like(module.bias)
