"""A decoder or encoder stack whose parts can be exchanged: attention, mask, positions, norm, feed-forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from oomguard.model.cases.step import MicroBatch, Network


@dataclass(frozen=True)
class Shape:
    """A stack's parts.

    Args:
        mask: ``causal`` (by name), ``none``, ``array`` (additive, T x T), ``bool`` (T x T), ``window`` (bool,
            the last ``seq // 4`` positions), ``padding`` (bool, B x 1 x 1 x T, from lengths in the batch).
        core: ``fast`` (``mx.fast.scaled_dot_product_attention``), ``written`` (matmul, softmax, matmul) or
            ``softcap`` (written, with tanh on the scores).
        positions: ``rope``, ``rope-traditional``, ``learned``, ``sinusoidal``, ``alibi`` (an additive mask a
            head) or ``none``.
        norm: ``rms``, ``layer`` or ``rms-written``.
        feed: ``gelu``, ``gelu-approx``, ``swiglu``, ``relu2``, ``experts`` (the best two of ``experts``,
            gathered) or ``experts-dense`` (all of them, weighted).
    """

    layers: int = 4
    width: int = 192
    heads: int = 6
    kv_heads: int = 6
    hidden: int = 512
    vocab: int = 512
    batch: int = 4
    seq: int = 192
    mask: str = "causal"
    core: str = "fast"
    positions: str = "rope"
    norm: str = "rms"
    feed: str = "swiglu"
    qk_norm: bool = False
    bias: bool = False
    tied: bool = False
    parallel: bool = False
    dropout: float = 0.0
    experts: int = 4
    loss_chunks: int = 1


class WrittenRMSNorm(nn.Module):
    """RMS norm from elementwise operations, as many a port has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = mx.ones((width,))

    def __call__(self, x: mx.array) -> mx.array:
        wide = x.astype(mx.float32)
        scaled = wide * mx.rsqrt(mx.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
        return self.weight * scaled.astype(x.dtype)


def make_norm(kind: str, width: int) -> nn.Module:
    kinds = {"rms": nn.RMSNorm, "layer": nn.LayerNorm, "rms-written": WrittenRMSNorm}
    norm: nn.Module = kinds[kind](width)
    return norm


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.head_dim = shape.width // shape.heads
        kv_width = self.head_dim * shape.kv_heads
        self.query = nn.Linear(shape.width, shape.width, bias=shape.bias)
        self.key = nn.Linear(shape.width, kv_width, bias=shape.bias)
        self.value = nn.Linear(shape.width, kv_width, bias=shape.bias)
        self.out = nn.Linear(shape.width, shape.width, bias=shape.bias)
        if shape.positions.startswith("rope"):
            self.rope = nn.RoPE(self.head_dim, traditional=shape.positions == "rope-traditional")
        if shape.qk_norm:
            self.query_norm = nn.RMSNorm(self.head_dim)
            self.key_norm = nn.RMSNorm(self.head_dim)

    def __call__(self, x: mx.array, mask: Any) -> mx.array:
        batch, tokens, width = x.shape
        q = self.query(x).reshape(batch, tokens, self.shape.heads, self.head_dim)
        k = self.key(x).reshape(batch, tokens, self.shape.kv_heads, self.head_dim)
        v = self.value(x).reshape(batch, tokens, self.shape.kv_heads, self.head_dim).transpose(0, 2, 1, 3)
        if "query_norm" in self:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = q.transpose(0, 2, 1, 3), k.transpose(0, 2, 1, 3)
        if "rope" in self:
            q, k = self.rope(q), self.rope(k)
        mixed = self._core(q, k, v, mask)
        return self.out(mixed.transpose(0, 2, 1, 3).reshape(batch, tokens, width))

    def _core(self, q: mx.array, k: mx.array, v: mx.array, mask: Any) -> mx.array:
        scale = self.head_dim**-0.5
        if self.shape.core == "fast":
            return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
        repeats = self.shape.heads // self.shape.kv_heads
        if repeats > 1:
            k, v = mx.repeat(k, repeats, axis=1), mx.repeat(v, repeats, axis=1)
        scores = (q * scale) @ k.swapaxes(-1, -2)
        if self.shape.core == "softcap":
            scores = 30.0 * mx.tanh(scores / 30.0)
        if mask is not None:
            scores = scores + mask
        return mx.softmax(scores, axis=-1, precise=True) @ v


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.kind = shape.feed
        self.up = nn.Linear(shape.width, shape.hidden, bias=shape.bias)
        self.down = nn.Linear(shape.hidden, shape.width, bias=shape.bias)
        if self.kind == "swiglu":
            self.gate = nn.Linear(shape.width, shape.hidden, bias=shape.bias)

    def __call__(self, x: mx.array) -> mx.array:
        if self.kind == "swiglu":
            return self.down(nn.silu(self.gate(x)) * self.up(x))
        if self.kind == "relu2":
            return self.down(nn.relu2(self.up(x)))
        gelu = nn.gelu_approx if self.kind == "gelu-approx" else nn.gelu
        return self.down(gelu(self.up(x)))


class GatheredExperts(nn.Module):
    """The two best of several experts for each token, through gathered matrix products."""

    BEST = 2

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        scale = shape.width**-0.5
        self.up = scale * mx.random.normal((shape.experts, shape.width, shape.hidden))
        self.down = scale * mx.random.normal((shape.experts, shape.hidden, shape.width))

    def __call__(self, x: mx.array) -> mx.array:
        logits = self.router(x)
        chosen = mx.stop_gradient(mx.argpartition(-logits, self.BEST - 1, axis=-1)[..., : self.BEST])
        weights = mx.softmax(mx.take_along_axis(logits, chosen, axis=-1), axis=-1, precise=True)
        hidden = nn.gelu(mx.gather_mm(mx.expand_dims(x, (-2, -3)), self.up, rhs_indices=chosen))
        outputs = mx.gather_mm(hidden, self.down, rhs_indices=chosen).squeeze(-2)
        return (outputs * weights[..., None]).sum(axis=-2)


class DenseExperts(nn.Module):
    """Every expert on every token, weighted by the router."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        scale = shape.width**-0.5
        self.up = scale * mx.random.normal((shape.experts, shape.width, shape.hidden))
        self.down = scale * mx.random.normal((shape.experts, shape.hidden, shape.width))

    def __call__(self, x: mx.array) -> mx.array:
        weights = mx.softmax(self.router(x), axis=-1)
        hidden = nn.gelu(mx.einsum("btd,edh->bteh", x, self.up))
        return mx.einsum("bteh,ehd,bte->btd", hidden, self.down, weights)


def make_feed(shape: Shape) -> nn.Module:
    if shape.feed == "experts":
        return GatheredExperts(shape)
    return DenseExperts(shape) if shape.feed == "experts-dense" else FeedForward(shape)


class Block(nn.Module):
    """Pre-norm; ``parallel`` feeds attention and feed-forward from one norm, as GPT-NeoX and PaLM do."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.parallel = shape.parallel
        self.attention_norm = make_norm(shape.norm, shape.width)
        self.attention = Attention(shape)
        if not shape.parallel:
            self.feed_norm = make_norm(shape.norm, shape.width)
        self.feed = make_feed(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def __call__(self, x: mx.array, mask: Any = None) -> mx.array:
        normed = self.attention_norm(x)
        if self.parallel:
            mixed: mx.array = x + self.attention(normed, mask) + self.feed(normed)
            return mixed
        x = x + self.dropout(self.attention(normed, mask))
        return x + self.dropout(self.feed(self.feed_norm(x)))


class Stack(nn.Module):
    """Embedding, blocks, final norm and head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        if shape.positions == "learned":
            self.learned = nn.Embedding(shape.seq, shape.width)
        elif shape.positions == "sinusoidal":
            self.sinusoidal = nn.SinusoidalPositionalEncoding(shape.width)
        self.layers = [Block(shape) for _ in range(shape.layers)]
        self.norm = make_norm(shape.norm, shape.width)
        if not shape.tied:
            self.head = nn.Linear(shape.width, shape.vocab, bias=False)

    def features(self, tokens: mx.array, lengths: mx.array | None) -> mx.array:
        x = self.tokens(tokens)
        if "learned" in self:
            x = x + self.learned(mx.arange(tokens.shape[1]))
        elif "sinusoidal" in self:
            x = x + self.sinusoidal(mx.arange(tokens.shape[1]))
        mask = make_mask(self.shape, x.dtype, lengths)
        for layer in self.layers:
            x = layer(x, mask)
        features: mx.array = self.norm(x)
        return features

    def logits(self, features: mx.array) -> mx.array:
        return self.tokens.as_linear(features) if self.shape.tied else self.head(features)


def make_mask(shape: Shape, dtype: mx.Dtype, lengths: mx.array | None) -> Any:
    """What the attention is given as its mask."""
    at = mx.arange(shape.seq)
    if shape.positions == "alibi":
        slopes = mx.power(2.0, -8.0 * mx.arange(1, shape.heads + 1) / shape.heads)
        distance = at[:, None] - at[None]
        bias = mx.where(distance >= 0, -slopes[:, None, None] * distance, mx.finfo(mx.float32).min)
        return bias.astype(dtype)[None]
    if shape.mask == "array":
        return nn.MultiHeadAttention.create_additive_causal_mask(shape.seq, dtype)
    if shape.mask == "bool":
        return at[:, None] >= at[None]
    if shape.mask == "window":
        return (at[:, None] >= at[None]) & (at[:, None] < at[None] + shape.seq // 4)
    if shape.mask == "padding":
        assert lengths is not None
        return (at[None] < lengths[:, None])[:, None, None]
    return None if shape.mask == "none" else "causal"


def language_model(dtype: mx.Dtype, **options: Any) -> Network:
    """Next-token prediction; ``loss_chunks`` computes head and cross-entropy in slices of the tokens."""
    shape = Shape(**options)
    model = Stack(shape)

    def loss(inputs: mx.array, targets: mx.array, lengths: mx.array | None = None) -> mx.array:
        features = model.features(inputs, lengths)
        if shape.loss_chunks == 1:
            return nn.losses.cross_entropy(
                model.logits(features).astype(mx.float32), targets, reduction="mean"
            )
        total = mx.array(0.0)
        for part, wanted in zip(
            mx.split(features, shape.loss_chunks, axis=1),
            mx.split(targets, shape.loss_chunks, axis=1),
            strict=True,
        ):
            total = total + mx.checkpoint(_part_loss)(part, model.head.weight, wanted)
        return total / targets.size

    def draw_batch(key: mx.array) -> MicroBatch:
        keys = mx.random.split(key, 3)
        inputs = mx.random.randint(0, shape.vocab, (shape.batch, shape.seq), key=keys[0])
        targets = mx.random.randint(0, shape.vocab, (shape.batch, shape.seq), key=keys[1])
        if shape.mask != "padding":
            return inputs, targets
        return inputs, targets, mx.random.randint(shape.seq // 2, shape.seq + 1, (shape.batch,), key=keys[2])

    return Network(model, loss, draw_batch, model.layers)


def _part_loss(features: mx.array, head: mx.array, targets: mx.array) -> mx.array:
    """Summed cross-entropy of some tokens; the head is an argument, so that it gets its gradient."""
    logits = (features @ head.T).astype(mx.float32)
    targets = mx.stop_gradient(targets)
    return nn.losses.cross_entropy(logits, targets, reduction="sum")


class EncoderClassifier(nn.Module):
    def __init__(
        self, vocab: int, width: int, heads: int, layers: int, dropout: float, checkpoint: bool
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.encoder = nn.TransformerEncoder(layers, width, heads, dropout=dropout, checkpoint=checkpoint)
        self.head = nn.Linear(width, 10)

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.head(self.encoder(self.tokens(tokens), None).mean(axis=1))


def nn_encoder(
    dtype: mx.Dtype,
    batch: int = 8,
    seq: int = 128,
    width: int = 192,
    dropout: float = 0.0,
    checkpoint: bool = False,
) -> Network:
    """``mlx.nn``'s own encoder, and its own ``checkpoint`` flag, under a classifier."""
    model = EncoderClassifier(512, width, 6, 4, dropout, checkpoint)

    def loss(tokens: mx.array, labels: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(tokens), labels, reduction="mean")

    def draw_batch(key: mx.array) -> MicroBatch:
        keys = mx.random.split(key)
        return (
            mx.random.randint(0, 512, (batch, seq), key=keys[0]),
            mx.random.randint(0, 10, (batch,), key=keys[1]),
        )

    return Network(model, loss, draw_batch, [] if checkpoint else list(model.encoder.layers))


class Translator(nn.Module):
    def __init__(self, vocab: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.transformer = nn.Transformer(width, 4, layers, layers, mlp_dims=2 * width)
        self.head = nn.Linear(width, vocab)

    def __call__(self, source: mx.array, target: mx.array) -> mx.array:
        mask = nn.MultiHeadAttention.create_additive_causal_mask(target.shape[1], self.tokens.weight.dtype)
        decoded = self.transformer(self.tokens(source), self.tokens(target), None, mask, None)
        return self.head(decoded)


def translator(dtype: mx.Dtype, batch: int = 6, seq: int = 96, width: int = 160, layers: int = 3) -> Network:
    """``mlx.nn``'s encoder and decoder with cross-attention."""
    vocab = 400
    model = Translator(vocab, width, layers)

    def loss(source: mx.array, target: mx.array, following: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(source, target), following, reduction="mean")

    def draw_batch(key: mx.array) -> MicroBatch:
        source, target, following = (
            mx.random.randint(0, vocab, (batch, seq), key=part) for part in mx.random.split(key, 3)
        )
        return source, target, following

    return Network(model, loss, draw_batch, list(model.transformer.encoder.layers))
