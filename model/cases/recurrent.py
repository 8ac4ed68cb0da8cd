"""Recurrent networks: one step of the sequence after the other, thousands of small arrays."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from oomguard.model.cases.step import MicroBatch, Network

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


class RecurrentModel(nn.Module):
    def __init__(self, kind: str, vocab: int, width: int, layers: int, both_ways: bool) -> None:
        super().__init__()
        self.is_lstm = kind == "lstm"
        self.both_ways = both_ways
        self.tokens = nn.Embedding(vocab, width)
        self.layers = [KINDS[kind](width, width) for _ in range(layers)]
        self.backwards = [KINDS[kind](width, width) for _ in range(layers)] if both_ways else []
        self.head = nn.Linear(width, vocab)

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.tokens(tokens)
        for i, layer in enumerate(self.layers):
            forwards = self._hidden(layer(x))
            if self.both_ways:
                forwards = forwards + self._hidden(self.backwards[i](x[:, ::-1]))[:, ::-1]
            x = forwards
        return self.head(x)

    def _hidden(self, output: mx.array | tuple[mx.array, mx.array]) -> mx.array:
        return output[0] if isinstance(output, tuple) else output


def recurrent(
    dtype: mx.Dtype,
    kind: str = "lstm",
    batch: int = 16,
    seq: int = 64,
    width: int = 192,
    layers: int = 2,
    both_ways: bool = False,
) -> Network:
    """Next-token prediction with ``mlx.nn``'s recurrent layers."""
    vocab = 256
    model = RecurrentModel(kind, vocab, width, layers, both_ways)

    def loss(inputs: mx.array, targets: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(inputs).astype(mx.float32), targets, reduction="mean")

    def draw_batch(key: mx.array) -> MicroBatch:
        keys = mx.random.split(key)
        inputs = mx.random.randint(0, vocab, (batch, seq), key=keys[0])
        return inputs, mx.random.randint(0, vocab, (batch, seq), key=keys[1])

    return Network(model, loss, draw_batch, [])
