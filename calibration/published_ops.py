"""Single operations whose peaks were published, each with the arrays it was measured on; nothing is evaluated.

An operation is (step, arguments): ``step(*arguments)`` gives what was evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import mlx.core as mx

from oomguard.errors import InputError

Op = tuple[Callable[..., Any], tuple[mx.array, ...]]


def _heads(batch: int, heads: int, tokens: int, dim: int) -> mx.array:
    return mx.zeros((batch, heads, tokens, dim), mx.bfloat16)


def plain_attention(batch: int, tokens: int, heads: int, kv_heads: int, dim: int, *, backward: bool) -> Op:
    """Causal attention without ``mx.fast``: keys and values gathered for every head, all of it in float32.

    With its backward, the sum of the output and the gradients of queries, keys and values.
    """
    head_of = [h * kv_heads // heads for h in range(heads)]

    def attend(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        chosen = mx.array(head_of)
        keys, values = (mx.take(x, chosen, axis=1).astype(mx.float32) for x in (k, v))
        scores = (q.astype(mx.float32) @ keys.swapaxes(-1, -2)) * dim**-0.5
        scores = scores + mx.triu(mx.full((tokens, tokens), -mx.inf), k=1)
        weights = mx.exp(scores - mx.logsumexp(scores, axis=-1)[..., None])
        return (weights @ values).astype(q.dtype)

    arguments = (
        _heads(batch, heads, tokens, dim),
        _heads(batch, kv_heads, tokens, dim),
        _heads(batch, kv_heads, tokens, dim),
    )
    if not backward:
        return attend, arguments
    return mx.value_and_grad(lambda *given: attend(*given).sum(), argnums=(0, 1, 2)), arguments


def fast_attention(batch: int, tokens: int, heads: int, kv_heads: int, dim: int, *, masked: bool) -> Op:
    """The gradients of ``mx.fast.scaled_dot_product_attention`` for a cotangent that is given.

    Args:
        masked: by a boolean array that is given; causal otherwise.
    """

    def summed(q: mx.array, k: mx.array, v: mx.array, cotangent: mx.array, *mask: mx.array) -> mx.array:
        how: Any = mask[0] if mask else "causal"
        return (mx.fast.scaled_dot_product_attention(q, k, v, scale=dim**-0.5, mask=how) * cotangent).sum()

    q = _heads(batch, heads, tokens, dim)
    k, v = (_heads(batch, kv_heads, tokens, dim) for _ in range(2))
    mask = [mx.zeros((tokens, tokens), mx.bool_)] if masked else []
    return mx.grad(summed, argnums=(0, 1, 2)), (q, k, v, mx.zeros_like(q), *mask)


def linear_cross_entropy(tokens: int, dim: int, vocab: int) -> Op:
    """The loss of every token from a bf16 projection to all logits, which are kept in float32; no gradient."""

    def losses(hidden: mx.array, weight: mx.array, targets: mx.array) -> mx.array:
        logits = (hidden @ weight.T).astype(mx.float32)
        score = mx.take_along_axis(logits, targets[:, None], axis=-1).squeeze(-1)
        return mx.logsumexp(logits, axis=-1) - score

    arguments = (
        mx.zeros((tokens, dim), mx.bfloat16),
        mx.zeros((vocab, dim), mx.bfloat16),
        mx.zeros((tokens,), mx.int32),
    )
    return losses, arguments


def gated_delta(tokens: int, key_heads: int, value_heads: int, dim: int, segment: int) -> Op:
    """mlx-lm's gated delta recurrence token by token, ``segment`` tokens a checkpoint, with its backward.

    Raises:
        InputError: mlx-lm is not installed.
    """
    try:
        step = import_module("mlx_lm.models.gated_delta")._gated_delta_step_ops
    except ModuleNotFoundError as error:
        raise InputError(f"mlx-lm has the gated delta rule ({error.name}); pip install mlx-lm") from error

    def recur(q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array) -> Any:
        outputs = []
        for t in range(q.shape[1]):
            y, state = step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state, None)
            outputs.append(y)
        return mx.stack(outputs, axis=1), state

    def loss(q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array) -> mx.array:
        again = mx.checkpoint(recur)
        state = mx.zeros((1, value_heads, dim, dim))
        q, k = (mx.repeat(x, value_heads // key_heads, axis=-2) for x in (q, k))
        outputs = []
        for start in range(0, tokens, segment):
            q_part, k_part, v_part, g_part, beta_part = (
                x[:, start : start + segment] for x in (q, k, v, g, beta)
            )
            y, state = again(q_part, k_part, v_part, g_part, beta_part, state)
            outputs.append(y)
        return mx.concatenate(outputs, axis=1).astype(mx.float32).sum()

    q, k = (mx.zeros((1, tokens, key_heads, dim), mx.bfloat16) for _ in range(2))
    v = mx.zeros((1, tokens, value_heads, dim), mx.bfloat16)
    g, beta = (mx.zeros((1, tokens, value_heads)) for _ in range(2))
    return mx.value_and_grad(loss, argnums=(0, 1, 2)), (q, k, v, g, beta)
