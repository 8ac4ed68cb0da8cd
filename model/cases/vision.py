"""Convolution networks and vision transformers."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from oomguard.model.cases.step import MicroBatch, Network

CLASSES = 10


def _classifier(model: nn.Module, layers: list[nn.Module], batch: int, *shape: int) -> Network:
    """Cross-entropy on random inputs of ``(batch, *shape)``."""

    def loss(images: mx.array, labels: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(images).astype(mx.float32), labels, reduction="mean")

    def draw_batch(key: mx.array) -> MicroBatch:
        keys = mx.random.split(key)
        images = mx.random.normal((batch, *shape), key=keys[0])
        return images, mx.random.randint(0, CLASSES, (batch,), key=keys[1])

    return Network(model, loss, draw_batch, layers)


class PlainConvNet(nn.Module):
    def __init__(self, channels: tuple[int, ...], pool: str) -> None:
        super().__init__()
        widths = (3, *channels)
        self.layers = [nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(widths)]
        self.pool = nn.MaxPool2d(2, 2) if pool == "max" else nn.AvgPool2d(2, 2)
        self.head = nn.Linear(channels[-1], CLASSES)

    def __call__(self, x: mx.array) -> mx.array:
        for layer in self.layers:
            x = self.pool(nn.relu(layer(x)))
        return self.head(x.mean(axis=(1, 2)))


def plain(dtype: mx.Dtype, batch: int = 16, size: int = 32, pool: str = "max") -> Network:
    """Convolution, ReLU, pooling, three times."""
    return _classifier(PlainConvNet((32, 64, 128), pool), [], batch, size, size, 3)


class ResidualBlock(nn.Module):
    def __init__(self, width: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = _image_norm(norm, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = _image_norm(norm, width)

    def __call__(self, x: mx.array) -> mx.array:
        inner = nn.relu(self.norm1(self.conv1(x)))
        out: mx.array = nn.relu(x + self.norm2(self.conv2(inner)))
        return out


def _image_norm(kind: str, width: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm(width)
    return (
        nn.GroupNorm(8, width, pytorch_compatible=True)
        if kind == "group"
        else nn.InstanceNorm(width, affine=True)
    )


class ResNet(nn.Module):
    def __init__(self, width: int, depth: int, norm: str) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.layers = [ResidualBlock(width, norm) for _ in range(depth)]
        self.head = nn.Linear(width, CLASSES)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(axis=(1, 2)))


def resnet(
    dtype: mx.Dtype, batch: int = 8, size: int = 24, width: int = 48, depth: int = 4, norm: str = "batch"
) -> Network:
    """Residual blocks; with batch norm, running statistics are part of the module's state."""
    model = ResNet(width, depth, norm)
    return _classifier(model, [] if norm == "batch" else list(model.layers), batch, size, size, 3)


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.scale = 1e-2 * mx.ones((width,))

    def __call__(self, x: mx.array) -> mx.array:
        return x + self.scale * self.down(nn.gelu(self.up(self.norm(self.depthwise(x)))))


class ConvNext(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.layers = [ConvNextBlock(width) for _ in range(depth)]
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.mean(axis=(1, 2))))


def convnext(dtype: mx.Dtype, batch: int = 8, size: int = 64, width: int = 64, depth: int = 4) -> Network:
    """Depthwise convolution, layer norm and a wide MLP."""
    model = ConvNext(width, depth)
    return _classifier(model, list(model.layers), batch, size, size, 3)


class Autoencoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.down2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1)
        self.up2 = nn.ConvTranspose2d(width, 3, 4, stride=2, padding=1)

    def __call__(self, x: mx.array) -> mx.array:
        x = nn.leaky_relu(self.down2(nn.leaky_relu(self.down1(x))))
        return mx.sigmoid(self.up2(nn.leaky_relu(self.up1(x))))


def autoencoder(dtype: mx.Dtype, batch: int = 32, size: int = 32, width: int = 32) -> Network:
    """Strided convolutions down, transposed ones up; mean squared error."""
    model = Autoencoder(width)

    def loss(images: mx.array) -> mx.array:
        return nn.losses.mse_loss(model(images), images, reduction="mean")

    def draw_batch(key: mx.array) -> MicroBatch:
        return (mx.random.uniform(shape=(batch, size, size, 3), key=key),)

    return Network(model, loss, draw_batch, [])


class UNet(nn.Module):
    """Two levels with skips, conditioned on the noise level."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.time = nn.Linear(1, 2 * width)
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.norm_in = nn.GroupNorm(8, width, pytorch_compatible=True)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.norm_mid = nn.GroupNorm(8, 2 * width, pytorch_compatible=True)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.upsample = nn.Upsample(scale_factor=2, mode="nearest")
        self.up = nn.Conv2d(3 * width, width, 3, padding=1)
        self.leave = nn.Conv2d(width, 3, 3, padding=1)

    def __call__(self, x: mx.array, noise_level: mx.array) -> mx.array:
        wide = nn.silu(self.norm_in(self.enter(x)))
        deep = nn.silu(self.down(wide) + self.time(noise_level[:, None])[:, None, None])
        deep = deep + self.middle(nn.silu(self.norm_mid(deep)))
        joined = mx.concatenate([wide, self.upsample(deep)], axis=-1)
        rebuilt: mx.array = self.leave(nn.silu(self.up(joined)))
        return rebuilt


def diffusion(dtype: mx.Dtype, batch: int = 6, size: int = 32, width: int = 32) -> Network:
    """A denoising step: noise and its level are drawn inside the step from the global random state."""
    model = UNet(width)

    def loss(images: mx.array) -> mx.array:
        level = mx.random.uniform(shape=(images.shape[0],)).astype(images.dtype)
        noise = mx.random.normal(images.shape).astype(images.dtype)
        keep = level[:, None, None, None]
        noisy = mx.sqrt(keep) * images + mx.sqrt(1 - keep) * noise
        return mx.mean(mx.square(model(noisy, level) - noise))

    def draw_batch(key: mx.array) -> MicroBatch:
        return (mx.random.normal((batch, size, size, 3), key=key),)

    return Network(model, loss, draw_batch, [])


class VisionTransformer(nn.Module):
    def __init__(self, size: int, patch: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        tokens = (size // patch) ** 2
        self.patch = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = mx.zeros((1, 1, width))
        self.positions = 0.02 * mx.random.normal((1, tokens + 1, width))
        self.layers = [
            nn.TransformerEncoderLayer(width, heads, 4 * width, activation=nn.gelu) for _ in range(depth)
        ]
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def __call__(self, images: mx.array) -> mx.array:
        x = self.patch(images).flatten(1, 2)
        first = mx.broadcast_to(self.class_token, (x.shape[0], 1, x.shape[2]))
        x = mx.concatenate([first, x], axis=1) + self.positions
        for layer in self.layers:
            x = layer(x, None)
        return self.head(self.norm(x[:, 0]))


def vit(
    dtype: mx.Dtype,
    batch: int = 8,
    size: int = 64,
    patch: int = 8,
    width: int = 192,
    depth: int = 4,
    heads: int = 6,
) -> Network:
    """Patches by a strided convolution, a class token, learned positions and ``mlx.nn`` encoder layers."""
    model = VisionTransformer(size, patch, width, depth, heads)
    return _classifier(model, list(model.layers), batch, size, size, 3)


class TemporalConvNet(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Conv1d(16, width, 1)
        self.layers = [TemporalBlock(width, 2**i) for i in range(depth)]
        self.head = nn.Linear(width, CLASSES)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(axis=1))


class TemporalBlock(nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, 2 * width, 3, padding=dilation, dilation=dilation)

    def __call__(self, x: mx.array) -> mx.array:
        return x + nn.glu(self.conv(x))


def temporal(dtype: mx.Dtype, batch: int = 8, length: int = 512, width: int = 48, depth: int = 5) -> Network:
    """Dilated one-dimensional convolutions with gates."""
    model = TemporalConvNet(width, depth)
    return _classifier(model, list(model.layers), batch, length, 16)


class VolumeNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(1, width, 3, padding=1)
        self.conv2 = nn.Conv3d(width, 2 * width, 3, stride=2, padding=1)
        self.head = nn.Linear(2 * width, CLASSES)

    def __call__(self, x: mx.array) -> mx.array:
        x = nn.relu(self.conv2(nn.relu(self.conv1(x))))
        return self.head(x.mean(axis=(1, 2, 3)))


def volume(dtype: mx.Dtype, batch: int = 8, size: int = 16, width: int = 16) -> Network:
    """Three-dimensional convolutions."""
    return _classifier(VolumeNet(width), [], batch, size, size, size, 1)


class SpectralLayer(nn.Module):
    """Mixes along the sequence with a Fourier transform, as FNet does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def __call__(self, x: mx.array) -> mx.array:
        x = x + (mx.fft.fft(x.astype(mx.float32), axis=1).real * x.shape[1] ** -0.5).astype(x.dtype)
        return x + self.down(nn.gelu(self.up(self.norm(x))))


class SpectralNet(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Linear(16, width)
        self.layers = [SpectralLayer(width) for _ in range(depth)]
        self.head = nn.Linear(width, CLASSES)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(axis=1))


def spectral(dtype: mx.Dtype, batch: int = 8, length: int = 256, width: int = 128, depth: int = 4) -> Network:
    """Fourier mixing in place of attention."""
    model: Any = SpectralNet(width, depth)
    return _classifier(model, list(model.layers), batch, length, 16)
