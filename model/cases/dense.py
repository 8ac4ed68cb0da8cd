"""Networks of plain matrix products, and the losses that give a step another outline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from oomguard.model.cases.step import MicroBatch, Network

ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "relu": nn.relu,
    "gelu": nn.gelu,
    "tanh": mx.tanh,
    "silu": nn.silu,
    "elu": nn.elu,
    "softplus": nn.softplus,
}


class DenseLayer(nn.Module):
    def __init__(self, width: int, activation: str, norm: bool, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.activation = activation
        self.dropout = nn.Dropout(dropout)
        if norm:
            self.norm = nn.LayerNorm(width)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.linear(x)
        if "norm" in self:
            x = self.norm(x)
        return self.dropout(ACTIVATIONS[self.activation](x))


class MLP(nn.Module):
    def __init__(self, width: int, depth: int, **layer: Any) -> None:
        super().__init__()
        self.layers = [DenseLayer(width, **layer) for _ in range(depth)]
        self.head = nn.Linear(width, 1)

    def __call__(self, x: mx.array) -> mx.array:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def mlp(
    dtype: mx.Dtype,
    batch: int = 1024,
    width: int = 256,
    depth: int = 16,
    activation: str = "relu",
    norm: bool = False,
    dropout: float = 0.0,
) -> Network:
    """A deep MLP on a regression. Its layer saves about two boundaries, so strides pay here."""
    model = MLP(width, depth, activation=activation, norm=norm, dropout=dropout)

    def loss(x: mx.array, y: mx.array) -> mx.array:
        return nn.losses.mse_loss(model(x), y, reduction="mean")

    def draw_batch(key: mx.array) -> MicroBatch:
        keys = mx.random.split(key)
        return mx.random.normal((batch, width), key=keys[0]), mx.random.normal((batch, 1), key=keys[1])

    return Network(model, loss, draw_batch, list(model.layers))


class MixerLayer(nn.Module):
    """Mixes along the tokens, then along the channels."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.token_norm = nn.LayerNorm(width)
        self.token_up = nn.Linear(tokens, 2 * tokens)
        self.token_down = nn.Linear(2 * tokens, tokens)
        self.channel_norm = nn.LayerNorm(width)
        self.channel_up = nn.Linear(width, 4 * width)
        self.channel_down = nn.Linear(4 * width, width)

    def __call__(self, x: mx.array) -> mx.array:
        across = self.token_norm(x).swapaxes(1, 2)
        x = x + self.token_down(nn.gelu(self.token_up(across))).swapaxes(1, 2)
        return x + self.channel_down(nn.gelu(self.channel_up(self.channel_norm(x))))


class Mixer(nn.Module):
    def __init__(self, tokens: int, width: int, depth: int) -> None:
        super().__init__()
        self.layers = [MixerLayer(tokens, width) for _ in range(depth)]
        self.head = nn.Linear(width, 10)

    def __call__(self, x: mx.array) -> mx.array:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(axis=1))


def mixer(dtype: mx.Dtype, batch: int = 16, tokens: int = 64, width: int = 128, depth: int = 6) -> Network:
    """An MLP-Mixer: transposes between matrix products."""
    model = Mixer(tokens, width, depth)

    def loss(x: mx.array, labels: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(x), labels, reduction="mean")

    def draw_batch(key: mx.array) -> MicroBatch:
        keys = mx.random.split(key)
        x = mx.random.normal((batch, tokens, width), key=keys[0])
        return x, mx.random.randint(0, 10, (batch,), key=keys[1])

    return Network(model, loss, draw_batch, list(model.layers))


class VariationalAutoencoder(nn.Module):
    def __init__(self, inputs: int, hidden: int, latent: int) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 2 * latent))
        self.decode = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, inputs))

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        mean, log_variance = mx.split(self.encode(x), 2, axis=-1)
        noise = mx.random.normal(mean.shape).astype(mean.dtype)
        return self.decode(mean + mx.exp(0.5 * log_variance) * noise), mean, log_variance


def vae(
    dtype: mx.Dtype, batch: int = 2048, inputs: int = 784, hidden: int = 512, latent: int = 64
) -> Network:
    """Random numbers inside the step, and a loss of two parts."""
    model = VariationalAutoencoder(inputs, hidden, latent)

    def loss(x: mx.array) -> mx.array:
        logits, mean, log_variance = model(x)
        rebuilt = nn.losses.binary_cross_entropy(logits, x, with_logits=True, reduction="sum") / x.shape[0]
        divergence = -0.5 * mx.mean(mx.sum(1 + log_variance - mean**2 - mx.exp(log_variance), axis=-1))
        return rebuilt + divergence

    def draw_batch(key: mx.array) -> MicroBatch:
        return (mx.random.uniform(shape=(batch, inputs), key=key),)

    return Network(model, loss, draw_batch, [])


class Recommender(nn.Module):
    """Large embeddings, little else: what the gradient of a gather costs."""

    def __init__(self, users: int, items: int, width: int) -> None:
        super().__init__()
        self.user_table = nn.Embedding(users, width)
        self.item_table = nn.Embedding(items, width)
        self.top = nn.Sequential(nn.Linear(3 * width, width), nn.ReLU(), nn.Linear(width, 1))

    def __call__(self, user: mx.array, item: mx.array) -> mx.array:
        u, i = self.user_table(user), self.item_table(item)
        out: mx.array = self.top(mx.concatenate([u, i, u * i], axis=-1)).squeeze(-1)
        return out


def recommender(
    dtype: mx.Dtype, batch: int = 4096, users: int = 40000, items: int = 20000, width: int = 64
) -> Network:
    """Click prediction."""
    model = Recommender(users, items, width)

    def loss(user: mx.array, item: mx.array, clicked: mx.array) -> mx.array:
        return nn.losses.binary_cross_entropy(model(user, item), clicked, with_logits=True, reduction="mean")

    def draw_batch(key: mx.array) -> MicroBatch:
        keys = mx.random.split(key, 3)
        return (
            mx.random.randint(0, users, (batch,), key=keys[0]),
            mx.random.randint(0, items, (batch,), key=keys[1]),
            mx.random.bernoulli(0.3, (batch,), key=keys[2]).astype(mx.float32),
        )

    return Network(model, loss, draw_batch, [])


class TwoTowers(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.left = [DenseLayer(width, "gelu", True, 0.0) for _ in range(depth)]
        self.right = [DenseLayer(width, "gelu", True, 0.0) for _ in range(depth)]
        self.temperature = mx.array(2.0)

    def __call__(self, a: mx.array, b: mx.array) -> mx.array:
        for layer in self.left:
            a = layer(a)
        for layer in self.right:
            b = layer(b)
        a = a / mx.linalg.norm(a, axis=-1, keepdims=True)
        b = b / mx.linalg.norm(b, axis=-1, keepdims=True)
        return mx.exp(self.temperature) * (a @ b.T)


def contrastive(dtype: mx.Dtype, batch: int = 768, width: int = 256, depth: int = 4) -> Network:
    """Two towers and a batch x batch matrix of similarities, read along both axes."""
    model = TwoTowers(width, depth)

    def loss(a: mx.array, b: mx.array) -> mx.array:
        similar = model(a, b)
        same = mx.arange(similar.shape[0])
        rows = nn.losses.cross_entropy(similar, same, reduction="mean")
        return 0.5 * (rows + nn.losses.cross_entropy(similar.T, same, reduction="mean"))

    def draw_batch(key: mx.array) -> MicroBatch:
        keys = mx.random.split(key)
        return mx.random.normal((batch, width), key=keys[0]), mx.random.normal((batch, width), key=keys[1])

    return Network(model, loss, draw_batch, [])


class StudentAndTeacher(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.student = MLP(width, 4, activation="relu", norm=False, dropout=0.0)
        self.teacher = MLP(width, 12, activation="relu", norm=False, dropout=0.0)
        self.teacher.freeze()


def distillation(dtype: mx.Dtype, batch: int = 1024, width: int = 256) -> Network:
    """A frozen teacher runs forward only; the student learns its outputs."""
    model = StudentAndTeacher(width)

    def loss(x: mx.array) -> mx.array:
        wanted = mx.stop_gradient(model.teacher(x))
        return nn.losses.huber_loss(model.student(x), wanted, reduction="mean")

    def draw_batch(key: mx.array) -> MicroBatch:
        return (mx.random.normal((batch, width), key=key),)

    return Network(model, loss, draw_batch, list(model.student.layers))


class Scan(nn.Module):
    """Gated linear recurrence through cumulative sums, with a sort in the pooling."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def __call__(self, x: mx.array) -> mx.array:
        decay = mx.cumsum(nn.log_sigmoid(self.gate(x)), axis=1)
        mixed = mx.cumsum(mx.exp(-mx.clip(decay, -2, 0)) * self.value(x), axis=1) * mx.exp(
            mx.clip(decay, -2, 0)
        )
        return x + self.out(mixed)


class ScanModel(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = [Scan(width) for _ in range(depth)]
        self.head = nn.Linear(width, 10)

    def __call__(self, x: mx.array) -> mx.array:
        for layer in self.layers:
            x = layer(x)
        return self.head(mx.sort(x, axis=1)[:, -8:].mean(axis=1))


def scan(dtype: mx.Dtype, batch: int = 8, seq: int = 128, width: int = 128, depth: int = 4) -> Network:
    """Cumulative sums and a sort."""
    model = ScanModel(width, depth)

    def loss(x: mx.array, labels: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(x), labels, reduction="mean")

    def draw_batch(key: mx.array) -> MicroBatch:
        keys = mx.random.split(key)
        x = mx.random.normal((batch, seq, width), key=keys[0])
        return x, mx.random.randint(0, 10, (batch,), key=keys[1])

    return Network(model, loss, draw_batch, list(model.layers))
