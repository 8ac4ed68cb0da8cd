"""What one training step holds, tensor by tensor, in bytes: whole numbers from shapes, nothing fitted, no MLX.

A step is a sequence of *moments*. At each, ``held`` is what must be alive (weights, optimizer state, saved
tensors, gradients made so far...), ``alive`` is what the running kernels make and have not dropped yet, and
``in_flight`` what they dropped but whose memory is not released yet. The peak is the largest moment, never a
sum of moments.

Which tensors a block saves was read off the graph MLX differentiates (``mx.export_function``): on the CPU
``mx.fast.layer_norm`` and ``mx.fast.scaled_dot_product_attention`` are decomposed, so their parts are saved. How
many tensors of each size are alive and in flight where a peak can lie is counted by simulating MLX's evaluator
on that graph (``calibration/count_moments.py`` writes ``data/moments.json``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Any, Literal, NamedTuple

from oomguard.config.model import ModelConfig
from oomguard.config.policy import Segment
from oomguard.config.step import StepConfig
from oomguard.units import round_up

Backend = Literal["cpu", "metal", "cuda"]

CATEGORIES = (
    "weights",
    "optimizer_state",
    "gradients",
    "batch",
    "saved_tensors",
    "attention_scores",
    "segment_inputs",
    "recompute",
    "logits_and_loss",
    "backward_temporaries",
    "update_temporaries",
    "in_flight_window",
    "page_rounding",
)

TOKEN_BYTES = 4  # int32 inputs and targets
LOSS_BYTES = 4  # logits are cast to float32 for the loss
STATS_BYTES = 4  # norm statistics are float32
PAGE_BYTES = 16384  # of Metal
# These read a gradient again after the parameter is updated (Lion's new moment), or need a norm of the update
# first, so the evaluation reaches a gradient's last use only when all are made.
LATE_OPTIMIZERS = ("lion", "adafactor", "muon")
STATE_COPIES = {"sgd": 1, "adam": 2, "adamw": 2, "lion": 1}
# Micro-batches in one graph run side by side; of what the kernels of one hold, so much comes on top for each
# further one (measured: 2 and 4 micro-batches of a small model; where blocks are recomputed, all of it).
INTERLEAVED = 0.6
WEIGHT_UNITS = ("matrix", "wide_matrix", "head", "positions")
# Metal's in-flight window: at most 10 command buffers are open, each committed after 40 kernels or once its
# distinct inputs pass 40 Mi elements (MLX_MAX_OPS_PER_BUFFER, MLX_MAX_MB_PER_BUFFER; read in MLX's source).
OPEN_BUFFERS, BUFFER_KERNELS, BUFFER_ELEMENTS = 10, 40, 40 << 20
BLOCK_KERNELS = 60  # of one block's backward, compiled: counted in the captured graph


class Saved(NamedTuple):
    """Bytes one block saves for its backward: its attention half but the scores, the scores, its MLP half."""

    attention: int
    scores: int
    mlp: int

    @property
    def total(self) -> int:
        return self.attention + self.scores + self.mlp


Kind = Literal["loss", "last", "inner", "end"]
Counts = dict[str, float]


class Vector(NamedTuple):
    """Counted tensors at one moment: ``after`` blocks of backward are done; counts by unit of size."""

    after: int
    alive: Counts
    in_flight: Counts


@cache
def _tables() -> dict[str, dict[str, dict[str, dict[Kind, list[list[Any]]]]]]:
    """``data/moments.json``: by way of running and width of the dtype, by what is recomputed, by layers."""
    text = resources.files("oomguard").joinpath("data/moments.json").read_text()
    tables: dict[str, Any] = json.loads(text)["moments"]
    return tables


class Counted(NamedTuple):
    """What was counted on one graph: its layers, blocks a segment, and the vectors of each kind of moment."""

    layers: int
    size: int
    kinds: dict[Kind, list[Vector]]


@cache
def counted(way: str, regions: tuple[str, ...], n_layers: int, least: int = 1) -> Counted:
    """Counts of the graph nearest to a model.

    Args:
        way: ``compiled full``, ``eager half``...: compiled or not, and the width of the dtype.
        regions: what is recomputed, in falling preference: the first that was counted is taken.
        n_layers: layers of the model; of those counted the nearest by ratio are taken.
        least: the fewest layers that show what is asked for.
    """
    tables = _tables()[way]
    region = next(region for region in regions if region in tables)
    sizes = tables[region]
    enough = [int(size) for size in sizes if int(size) >= least] or [max(int(size) for size in sizes)]
    layers = min(enough, key=lambda size: max(size, n_layers) / min(size, n_layers))
    kinds = sizes[str(layers)]
    size = int(region.split(",")[0].split()[1]) if region.startswith("segment") else 1
    return Counted(layers, size, {kind: [Vector(*vector) for vector in kinds[kind]] for kind in kinds})


@dataclass(frozen=True)
class Moment:
    """A point of the step where the peak can lie.

    Attributes:
        kind: ``loss`` (forward and loss), ``last`` (backward of the last block), ``inner`` (of another), ``end``
            (after the backward).
        block: the block being differentiated; -1 outside the blocks.
        held: bytes that are alive, by category.
        alive_bytes: bytes the running kernels have made, beside what is held.
        in_flight_bytes: bytes dropped and not yet released, counted on the CPU.
        window_bytes: what Metal's open command buffers can hold; 0 on the CPU.
    """

    kind: Kind
    block: int
    held: dict[str, int]
    alive_bytes: int
    in_flight_bytes: int
    window_bytes: int = 0

    @cached_property
    def held_bytes(self) -> int:
        return sum(self.held.values())


def _rounding(size_bytes: int) -> int:
    return round_up(size_bytes, PAGE_BYTES) - size_bytes if size_bytes > PAGE_BYTES else 0


class Run(NamedTuple):
    """Blocks ``start`` to ``stop`` (exclusive) in segments of ``size``, all treated alike.

    ``last``: it ends with the model's last block, so the backward begins in it.
    """

    start: int
    stop: int
    size: int
    region: str
    last: bool

    def places(self, after: int, found: Counted) -> Iterator[int]:
        """The blocks that correspond to one of a counted graph, where ``after`` blocks are done.

        What is kept for the update grows with the blocks done, so a block corresponds by its distance from the
        end of the run and by that from its start. Segments are counted from the end. Within one the place is
        kept: its last block, where the backward enters it and all of it is made again, stays the last. Where
        the last segment is shorter than the rest, the one before it corresponds too.
        """
        after = after if self.last else after - 1
        if self.size == 1:
            yield from {
                max(self.start, self.stop - 1 - max(0, after)),
                min(self.stop - 1, self.start + max(0, found.layers - 1 - after)),
            }
            return
        segments = -(-(self.stop - self.start) // self.size)
        done = max(0, after) // found.size
        offset = (found.layers - 1 - after) % found.size
        for segment in {segments - 1 - done, segments - 2 - done}:
            first = self.start + max(0, segment) * self.size
            length = min(self.size, self.stop - first)
            yield first + (length - 1 if offset == found.size - 1 else min(offset, length - 1))


class Inventory:
    """The tensors of one configuration on one backend.

    Args:
        model: the shape.
        step: the settings.
        backend: ``cpu`` decomposes layer norms; on ``metal`` and ``cuda`` they are one primitive that saves its
            input and output.
    """

    def __init__(self, model: ModelConfig, step: StepConfig, backend: Backend = "cpu") -> None:
        self.model = model
        self.step = step
        self.backend = backend
        tokens, item = step.batch * step.seq_len, step.item_bytes
        self.tokens = tokens
        self.stream_bytes = tokens * model.d_model * item
        self.wide_bytes = tokens * model.d_mlp * item
        self.scores_bytes = step.batch * model.n_heads * step.seq_len**2 * item
        self.logits_bytes = tokens * model.vocab_size * LOSS_BYTES
        self.weights_bytes = model.params * item
        self.block_weights_bytes = model.block_params * item
        self.head_weights_bytes = model.vocab_size * model.d_model * item
        self.batch_bytes = 2 * step.accumulate * tokens * TOKEN_BYTES

    # -- what lives through the step ------------------------------------------------------------------

    @cached_property
    def optimizer_state_bytes(self) -> int:
        """Moments in the parameters' dtype, as MLX keeps them."""
        model, item = self.model, self.step.item_bytes
        d, m, layers = model.d_model, model.d_mlp, model.n_layers
        if self.step.optimizer in STATE_COPIES:
            return STATE_COPIES[self.step.optimizer] * self.weights_bytes
        matrices = layers * (4 * d * d + 2 * d * m)
        if self.step.optimizer == "muon":  # one moment for the blocks' matrices, AdamW's two for the rest
            return (matrices + 2 * (model.params - matrices)) * item
        sides = layers * (4 * 2 * d + 2 * (d + m)) + (model.vocab_size + d) + (model.context + d)
        embeddings = (model.vocab_size + model.context) * d
        return (
            sides + model.params - matrices - embeddings
        ) * item  # adafactor: rows and columns of a matrix

    @cached_property
    def page_rounding_bytes(self) -> int:
        """What Metal adds to parameters, moments and saved tensors: above a page, whole pages of 16 KiB."""
        if self.backend != "metal":
            return 0
        model, item = self.model, self.step.item_bytes
        d, m = model.d_model, model.d_mlp
        block = 4 * (_rounding(d * d * item) + _rounding(d * item)) + 2 * _rounding(d * m * item)
        block += _rounding(m * item) + 5 * _rounding(d * item)
        whole = (
            model.n_layers * block
            + _rounding(model.vocab_size * d * item)
            + _rounding(model.context * d * item)
        )
        saved = (
            10 * _rounding(self.stream_bytes) + 4 * _rounding(self.wide_bytes) + _rounding(self.scores_bytes)
        )
        kept = sum(1 for found in self.kept if found.mlp)
        return (1 + STATE_COPIES.get(self.step.optimizer, 1)) * whole + kept * saved

    # -- what the forward saves -----------------------------------------------------------------------

    @cached_property
    def norm_saved_bytes(self) -> int:
        """One layer norm: centred (float32), normalised and affine output, and two statistics a token on the CPU."""
        if self.backend != "cpu":
            return 3 * self.stream_bytes
        elements = self.tokens * self.model.d_model
        return elements * STATS_BYTES + 2 * self.stream_bytes + 2 * self.tokens * STATS_BYTES

    @cached_property
    def block_saved(self) -> Saved:
        """Saved by a block that is not recomputed.

        Attention: its norm, scaled queries, keys, values, the mixed heads; softmax of the scores. MLP: its norm,
        and the wide tensor before GELU, scaled, inside (1 + erf) and after.
        """
        dropout = self.stream_bytes if self.model.dropout else 0
        mask = self.step.seq_len**2  # the causal mask, one byte each
        return Saved(
            attention=self.norm_saved_bytes + 4 * self.stream_bytes + dropout + mask,
            scores=self.scores_bytes,
            mlp=self.norm_saved_bytes + 4 * self.wide_bytes + dropout,
        )

    @cached_property
    def block_to_boundary(self) -> float:
        """Bytes a block saves over the bytes between two blocks; decides ``stride=auto``."""
        return self.block_saved.total / self.stream_bytes

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        return self.step.checkpoint.segments(self.model.n_layers, self.block_to_boundary)

    @cached_property
    def kept(self) -> list[Saved]:
        """What each block keeps from forward to backward under the policy; segment inputs not included."""
        kept = [self.block_saved] * self.model.n_layers
        for segment in self.segments:
            for block in range(segment.start, segment.stop):
                kept[block] = self.kept_when_recomputed(segment.region)
        return kept

    def kept_when_recomputed(self, region: str) -> Saved:
        if region == "attention":
            return self.block_saved._replace(scores=0)
        if self.step.checkpoint.policy == "custom_function" and self.step.compiled:
            return self.merged_saved
        return Saved(0, 0, 0)

    @cached_property
    def merged_saved(self) -> Saved:
        """What stays saved when ``mx.compile`` merges a bare recompute with the forward.

        The recompute starts from the same input, so equal nodes merge from there on: the first norm, queries,
        keys, values and the softmax of the scores are made once and kept. Behind the product with the values
        they are made twice.
        """
        return Saved(attention=self.norm_saved_bytes + 3 * self.stream_bytes, scores=self.scores_bytes, mlp=0)

    # -- what is held, and when ------------------------------------------------------------------------

    def held_in_forward(self) -> dict[str, int]:
        """Alive when the forward is done: what every block keeps, and the inputs of the segments."""
        return self._base() | {"gradients": self._gradients(0)} | self._saved_below(self.model.n_layers)

    def held_before(self, block: int) -> dict[str, int]:
        """Alive while the backward is in ``block``, without what it recomputes of that block itself."""
        segment = self._segment_of(block)
        whole = segment is not None and segment.region == "block"
        held = self._base() | self._saved_below(segment.start if whole and segment else block + 1)
        after = self.model.n_layers - 1 - block
        held["gradients"] = self._gradients(self.head_weights_bytes + after * self.block_weights_bytes)
        held["recompute"] = self.lag_bytes * self._recomputed_after(block) if self.lag_bytes else 0
        if whole and segment:
            held["segment_inputs"] += self.stream_bytes
            others = (block - segment.start) * (1 + self._waiting)
            held["recompute"] += others * self.block_saved.total
        return held

    def held_at_end(self) -> dict[str, int]:
        """Alive when the backward is done. Lion's new moments stand beside the parameters' old ones here."""
        gradients = self._gradients(self.weights_bytes)
        if self.step.clip_norm and not self.step.compiled and self.step.accumulate == 1:
            gradients = 0
        if self.step.optimizer == "lion":
            gradients += self.weights_bytes
        return self._base() | {"gradients": gradients}

    def _base(self) -> dict[str, int]:
        return {
            "weights": self.weights_bytes,
            "optimizer_state": self.optimizer_state_bytes,
            "batch": self.batch_bytes,
            "page_rounding": self.page_rounding_bytes,
        }

    def _saved_below(self, below: int) -> dict[str, int]:
        """What the blocks before ``below`` keep, and the inputs of their segments."""
        saved, scores, starts = self._kept_sums[below]
        if self._waiting:
            all_saved, all_scores, _ = self._kept_sums[-1]
            saved += self._waiting * all_saved
            scores += self._waiting * all_scores
            starts *= self.step.accumulate
        return {
            "saved_tensors": saved,
            "attention_scores": scores,
            "segment_inputs": self.stream_bytes * starts,
        }

    @cached_property
    def _kept_sums(self) -> list[tuple[int, int, int]]:
        """Of the first n blocks: bytes kept but for scores, bytes of scores, segments that start in them."""
        entered = {segment.start for segment in self.segments if segment.region == "block"}
        sums = [(0, 0, 0)]
        for block, found in enumerate(self.kept):
            saved, scores, starts = sums[-1]
            sums.append(
                (saved + found.attention + found.mlp, scores + found.scores, starts + (block in entered))
            )
        return sums

    @property
    def _waiting(self) -> int:
        """Micro-batches beside the current one whose tensors are alive: all, where one graph holds them."""
        return 0 if self.step.evaluate_micro_steps else self.step.accumulate - 1

    def _segment_of(self, block: int) -> Segment | None:
        if not self.segments or block >= self.segments[-1].stop:
            return None
        return self.segments[
            block // len(self.segments[0])
        ]  # from block 0 on, all but the last of one length

    @cached_property
    def lag_bytes(self) -> int:
        """What each recomputed block leaves behind until the update, because its weight gradients come late.

        A weight gradient is a product of a saved tensor and a cotangent. Evaluation goes breadth-first from the
        outputs, so where something stands between gradient and parameter (Muon's iteration, the norm that
        clipping needs) all those products wait for it, and keep their operands: of the six matrices 8 streams and
        2 wide tensors, and under clipping those of norms and biases. A compiled step clips later and keeps less.
        """
        if not any(segment.region == "block" for segment in self.segments):
            return 0
        graphs = 1 + self._waiting
        if self.step.clip_norm and not self.step.compiled:
            return graphs * (13 * self.stream_bytes + 2 * self.wide_bytes)
        if self.step.optimizer == "muon":
            return graphs * (8 * self.stream_bytes + 2 * self.wide_bytes)
        return 6 * self.stream_bytes if self.step.clip_norm else 0

    def _recomputed_after(self, block: int) -> int:
        """Recomputed blocks whose backward is done when it reaches ``block``."""
        return sum(
            max(0, segment.stop - max(segment.start, block + 1))
            for segment in self.segments
            if segment.region == "block"
        )

    def _gradients(self, made: int) -> int:
        """Gradients alive once ``made`` bytes of them are complete.

        The update takes a gradient as soon as it is complete, so the few that are alive count as what kernels
        have just made. All made so far are kept when clipping needs the norm of all, or the optimizer's last use
        of them is late. The sum of earlier micro-batches is kept whole; new
        gradients are added to it in place.
        """
        if self.step.accumulate > 1 and self.step.evaluate_micro_steps:
            return self.weights_bytes
        return made if self.step.clip_norm or self.step.optimizer in LATE_OPTIMIZERS else 0

    # -- the moments ----------------------------------------------------------------------------------

    def moments(self) -> Iterator[Moment]:
        """Every moment where the peak can lie. Between those listed the bytes held change linearly."""
        last = self.model.n_layers - 1
        top = self._counted(self._region_of(last)).kinds
        yield from self._moments("loss", -1, self.held_in_forward(), top["loss"])
        yield from self._moments("last", last, self.held_before(last), top["last"])
        held: dict[int, dict[str, int]] = {}
        for run in self._runs():
            found = self._counted(run.region)
            for vector in found.kinds["inner"]:
                for block in run.places(vector.after, found):
                    if block < last:
                        held[block] = held.get(block) or self.held_before(block)
                        yield from self._moments("inner", block, held[block], [vector])
        yield from self._moments("end", -1, self.held_at_end(), self._end_vectors())

    def _moments(
        self, kind: Kind, block: int, held: dict[str, int], vectors: list[Vector]
    ) -> Iterator[Moment]:
        whole = block >= 0 and self._region_of(block) not in ("none", "attention")
        graphs = 1 + self._waiting * (1.0 if whole else INTERLEAVED)
        window = 0 if self.backend == "cpu" else self.window_bytes
        for vector in vectors:
            alive = self._sized(vector.alive, graphs)
            yield Moment(kind, block, held, alive, self._sized(vector.in_flight), window)

    def _sized(self, counts: Counts, graphs: float = 1) -> int:
        """Bytes of counted tensors; what is not of the parameters is there once for every graph side by side."""
        units = self.units
        if graphs == 1:
            return int(sum([count * units[name] for name, count in counts.items()]))
        parts = (
            (1 if name in WEIGHT_UNITS else graphs) * count * units[name] for name, count in counts.items()
        )
        return int(sum(parts))

    @cached_property
    def units(self) -> dict[str, int]:
        """Bytes of one tensor of each size a step has."""
        model, step, item = self.model, self.step, self.step.item_bytes
        d, m = model.d_model, model.d_mlp
        return {
            "stream": self.stream_bytes,
            "wide": self.wide_bytes,
            "scores": self.scores_bytes,
            "logits": self.logits_bytes,
            "token_stats": self.tokens * STATS_BYTES,
            "score_stats": step.batch * model.n_heads * step.seq_len * item,
            "matrix": d * d * item,
            "wide_matrix": d * m * item,
            "head": self.head_weights_bytes,
            "positions": model.context * d * item,
            "mask": step.seq_len**2,
        }

    def _region_of(self, block: int) -> str:
        segment = self._segment_of(block)
        if segment is None:
            return "none"
        if self.step.checkpoint.policy == "custom_function":
            return "custom_function"
        return segment.region if len(segment) == 1 else f"segment {len(segment)}"

    def _runs(self) -> list[Run]:
        """Stretches of blocks treated alike."""
        layers = self.model.n_layers
        covered = self.segments[-1].stop if self.segments else 0
        size = len(self.segments[0]) if self.segments else 1
        runs = [Run(0, covered, size, self._region_of(0), covered == layers)] if covered else []
        if covered < layers:
            runs.append(Run(covered, layers, 1, "none", True))
        return runs

    def _counted(self, region: str) -> Counted:
        """The counts for a region, with segments as long and an update that orders alike, if those were counted."""
        alike, least = [region], 1
        if region.startswith("segment"):
            size = int(region.split()[1])
            alike += [f"segment {k}" for k in (4, 3, 2) if k < size]
            least = 2 * size
        # How the update orders matters more than how long a segment is. Micro-batches in one graph mix the orders.
        variants = self._variants if not self._waiting or region in ("none", "block") else []
        regions = [f"{like}, {variant}" for variant in variants for like in alike] + alike
        compiled = (
            self.step.compiled and not self._waiting
        )  # micro-batches in one graph undo compiling's order
        width = "full" if self.step.item_bytes == 4 else "half"
        way = f"{'compiled' if compiled else 'eager'} {width}"
        return counted(way, tuple(regions), self.model.n_layers, least)

    def _end_vectors(self) -> list[Vector]:
        run = "compiled" if self.step.compiled else "eager"
        regions = (*(f"none, {variant}" for variant in self._variants), "none")
        return counted(f"{run} full", regions, self.model.n_layers).kinds["end"]

    @property
    def _variants(self) -> list[str]:
        """What of the update changes the order of evaluation, in falling preference."""
        optimizer = self.step.optimizer
        return [f"{optimizer} clip", "clip"] if self.step.clip_norm else [optimizer]

    # -- single tensors and traffic --------------------------------------------------------------------

    @cached_property
    def largest_tensor_bytes(self) -> int:
        """The largest single buffer, to hold against the largest the device can make."""
        model = self.model
        matrix = max(
            model.vocab_size * model.d_model, model.context * model.d_model, model.d_model * model.d_mlp
        )
        return max(
            self.scores_bytes,
            self.wide_bytes,
            self.logits_bytes,
            self.stream_bytes,
            matrix * self.step.item_bytes,
        )

    @cached_property
    def window_bytes(self) -> int:
        """What the kernels in Metal's open command buffers write: bounded by their number, or by their size.

        The backward of a block writes about twice what the block saves, and what it makes again.
        """
        remade = 0
        for segment in self.segments[:1]:
            remade = self.block_saved.total - self.kept_when_recomputed(segment.region).total
        by_count = OPEN_BUFFERS * BUFFER_KERNELS * (2 * self.block_saved.total + remade) // BLOCK_KERNELS
        return min(by_count, OPEN_BUFFERS * BUFFER_ELEMENTS * self.step.item_bytes)

    def features(self) -> dict[str, float]:
        """What a fit's range is kept in: an estimate outside is an extrapolation."""
        return {
            "params": float(self.model.params),
            "tokens": float(self.tokens),
            "seq_len": float(self.step.seq_len),
        }
