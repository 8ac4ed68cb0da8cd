"""The small GPT of published training runs from scratch on Macs, from what a report says of it.

Reports of one family of scripts: blocks of RMS norms without weights, attention with rotary embeddings and a norm of
queries and keys, and an MLP; every block's input is scaled and added to a scaled first one, by scalars in float32. So
the residual stream is float32, whatever the weights are, and with it every activation and the logits. Every other
block, the last among them, adds a second embedding of the tokens to its values. Masks are additive, in float32, made
once and kept.

A step is not compiled: loss and gradients of each micro-batch are evaluated, then the update by itself, which holds no
activation. The loss of the evaluation is not compiled either; its batch is larger, so it often sets the peak of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

Activation = Literal["relu2", "silu"]

HEAD_DIM = 128
GATE_CHANNELS = 32
LOGIT_CAP = 15.0


@dataclass(frozen=True)
class ScratchConfig:
    """What a report says of its model.

    Attributes:
        mlp: width of the MLP over that of the model.
        logit_cap: the logits are bounded by a hyperbolic tangent.
    """

    depth: int
    dim: int
    mlp: int
    activation: Activation
    logit_cap: bool
    vocab: int
    tokens: int

    def embeds_values(self, block: int) -> bool:
        """Whether a block adds an embedding of the tokens to its values."""
        return (self.depth - 1 - block) % 2 == 0


def rms(x: mx.array) -> mx.array:
    """RMS norm without a weight, written out."""
    return x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + 1e-5)


class _Attention(nn.Module):
    def __init__(self, config: ScratchConfig, embeds_values: bool):
        super().__init__()
        dim = config.dim
        self.heads = dim // HEAD_DIM
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        if embeds_values:
            self.gate = nn.Linear(GATE_CHANNELS, self.heads, bias=False)
        self.rope = nn.RoPE(HEAD_DIM, traditional=True)

    def __call__(self, x: mx.array, embedded: mx.array | None, mask: mx.array) -> mx.array:
        shape = (*x.shape[:2], self.heads, HEAD_DIM)
        q, k, v = (project(x).reshape(shape) for project in (self.query, self.key, self.value))
        if embedded is not None:
            gate = 2 * mx.sigmoid(self.gate(x[..., :GATE_CHANNELS]))
            v = v + gate[..., None] * embedded.reshape(shape)
        q, k, v = (heads.transpose(0, 2, 1, 3) for heads in (q, k, v))
        q, k = rms(self.rope(q)), rms(self.rope(k))
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=HEAD_DIM**-0.5, mask=mask)
        joined: mx.array = self.out(y.transpose(0, 2, 1, 3).reshape(x.shape))
        return joined


class _MLP(nn.Module):
    def __init__(self, config: ScratchConfig):
        super().__init__()
        self.up = nn.Linear(config.dim, config.mlp * config.dim, bias=False)
        self.down = nn.Linear(config.mlp * config.dim, config.dim, bias=False)
        self.activation = config.activation

    def __call__(self, x: mx.array) -> mx.array:
        h = self.up(x)
        h = nn.silu(h) if self.activation == "silu" else mx.maximum(h, 0) ** 2
        y: mx.array = self.down(h)
        return y


class _Block(nn.Module):
    def __init__(self, config: ScratchConfig, embeds_values: bool):
        super().__init__()
        self.attention = _Attention(config, embeds_values)
        self.mlp = _MLP(config)

    def __call__(self, x: mx.array, embedded: mx.array | None, mask: mx.array) -> mx.array:
        x = x + self.attention(rms(x), embedded, mask)
        return x + self.mlp(rms(x))


class ScratchGPT(nn.Module):
    """Tokens and targets to the loss of every token."""

    def __init__(self, config: ScratchConfig):
        super().__init__()
        self.logit_cap = config.logit_cap
        self.embedding = nn.Embedding(config.vocab, config.dim)
        with_values = [config.embeds_values(i) for i in range(config.depth)]
        self.blocks = [_Block(config, embeds) for embeds in with_values]
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self.value_embeddings = {
            str(i): nn.Embedding(config.vocab, config.dim) for i, embeds in enumerate(with_values) if embeds
        }
        self.set_dtype(mx.bfloat16)
        self.residual_scales = mx.ones((config.depth,))
        self.first_scales = mx.zeros((config.depth,))
        # One for whole sequences and one for windows; the report does not say which blocks have which.
        self._masks = [mx.zeros((config.tokens, config.tokens)) for _ in range(2)]

    def __call__(self, tokens: mx.array, targets: mx.array) -> mx.array:
        x = first = rms(self.embedding(tokens))
        for i, block in enumerate(self.blocks):
            x = self.residual_scales[i] * x + self.first_scales[i] * first
            embedded = self.value_embeddings[str(i)](tokens) if str(i) in self.value_embeddings else None
            x = block(x, embedded, self._masks[i % 2])
        logits = self.head(rms(x)).astype(mx.float32)
        if self.logit_cap:
            logits = LOGIT_CAP * mx.tanh(logits / LOGIT_CAP)
        known = targets != -1
        chosen = mx.where(known, targets, mx.zeros_like(targets))
        score = mx.take_along_axis(logits, chosen[..., None], axis=-1).squeeze(-1)
        return (mx.logsumexp(logits, axis=-1) - score) * known


@dataclass
class ScratchCall:
    """One evaluation of a run: call ``step(*arguments)``, and evaluate what it returns.

    ``held`` is what the script keeps besides the model: moments in float32, and gradients of micro-batches before.
    """

    step: Callable[..., Any]
    arguments: tuple[Any, ...]
    held: list[Any]
    model: ScratchGPT

    @staticmethod
    def evaluated(returned: Any, state: list[Any]) -> Any:
        return returned


def training_call(config: ScratchConfig, batch: int, accumulate: int) -> ScratchCall:
    """Loss and gradients of the last micro-batch of an update, beside the sum of those before."""
    model = ScratchGPT(config)

    def loss(model: ScratchGPT, tokens: mx.array, targets: mx.array) -> mx.array:
        return model(tokens, targets).sum() / mx.maximum((targets != -1).sum(), 1)

    gradients_of = nn.value_and_grad(model, loss)
    held = [*_moments(model), *(_gradients(model) if accumulate > 1 else [])]
    return ScratchCall(
        lambda tokens, targets: gradients_of(model, tokens, targets),
        _batch(batch, config.tokens),
        held,
        model,
    )


def evaluation_call(config: ScratchConfig, batch: int, accumulate: int) -> ScratchCall:
    """The summed loss of a batch, of the tokens that stand for bytes, beside the last gradients and their sum."""
    model = ScratchGPT(config)

    def losses(tokens: mx.array, targets: mx.array, token_bytes: mx.array) -> mx.array:
        per_token = model(tokens, targets).reshape(-1)
        return (per_token * (mx.take(token_bytes, targets.reshape(-1), axis=0) > 0)).sum()

    gradients = [g for _ in range(min(2, accumulate)) for g in _gradients(model)]
    arguments = (*_batch(batch, config.tokens), mx.zeros((config.vocab,), mx.int32))
    return ScratchCall(losses, arguments, [*_moments(model), *gradients], model)


def _batch(batch: int, tokens: int) -> tuple[mx.array, mx.array]:
    return mx.zeros((batch, tokens), mx.int32), mx.zeros((batch, tokens), mx.int32)


def _moments(model: nn.Module) -> list[mx.array]:
    return [mx.zeros(p.shape) for p in _parameters(model) for _ in range(2)]


def _gradients(model: nn.Module) -> list[mx.array]:
    return [mx.zeros_like(p) for p in _parameters(model)]


def _parameters(model: nn.Module) -> list[mx.array]:
    flat: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    return [parameter for _, parameter in flat]
