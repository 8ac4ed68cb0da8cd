"""What one training step holds, tensor by tensor, in bytes: whole numbers from shapes, nothing fitted, no MLX.

A step is a sequence of *moments*: the loss, the backward of some block's MLP, of its attention, the update.
At each, ``held`` is what must be alive (weights, moments, saved tensors, gradients made so far...) and
``work`` is the size of *one* tensor of each kind the kernels of that moment make and drop. How many of those
live at once is what ``coefficients.py`` knows; the peak is the largest moment, never a sum of moments.

Which tensors a block saves was read off the graph MLX differentiates (``mx.export_function``): on the CPU
``mx.fast.layer_norm`` and ``mx.fast.scaled_dot_product_attention`` are decomposed, so their parts are saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from oomguard.config import ModelConfig, Segment, StepConfig

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
STATE_COPIES = {"sgd": 1, "adam": 2, "adamw": 2, "lion": 1}
# Metal's in-flight window: at most 10 command buffers are open, each committed after 40 kernels or once its
# distinct inputs pass 40 Mi elements (MLX_MAX_OPS_PER_BUFFER, MLX_MAX_MB_PER_BUFFER; read in MLX's source).
OPEN_BUFFERS, BUFFER_KERNELS, BUFFER_ELEMENTS = 10, 40, 40 << 20
BLOCK_KERNELS = 60  # of one block's backward, compiled: counted in the captured graph
LAG_BLOCKS = 8  # a lag of wide tensors grows up to about this many recomputed blocks, then no more


class Saved(NamedTuple):
    """Bytes one block saves for its backward: its attention half but the scores, the scores, its MLP half."""

    attention: int
    scores: int
    mlp: int

    @property
    def total(self) -> int:
        return self.attention + self.scores + self.mlp


@dataclass(frozen=True)
class Moment:
    """A point of the step where the peak can lie.

    Attributes:
        phase: ``loss``, ``backward``, ``recompute`` or ``update``.
        block: the block being differentiated; -1 outside the blocks.
        held: bytes that are alive, by category.
        work: bytes of one tensor of each kind the running kernels make; keys are coefficient names.
    """

    phase: str
    block: int
    held: dict[str, int]
    work: dict[str, int]

    @cached_property
    def held_bytes(self) -> int:
        return sum(self.held.values())


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
        return (sides + model.params - matrices - embeddings) * item  # adafactor: rows and columns of a matrix

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
        return Saved(
            attention=self.norm_saved_bytes + 4 * self.stream_bytes + dropout,
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

    # -- the moments ----------------------------------------------------------------------------------

    def moments(self) -> Iterator[Moment]:
        """Every moment where the peak can lie. Between those listed the bytes held change linearly."""
        for moment in self._graph_moments():
            if self.backend != "cpu":
                moment.work["window"] = self.window_bytes
            yield moment

    def _graph_moments(self) -> Iterator[Moment]:
        yield self._loss()
        for block in self._blocks_to_check():
            yield from self._backward(block)
        yield self._update()

    def _base(self) -> dict[str, int]:
        held = {
            "weights": self.weights_bytes,
            "optimizer_state": self.optimizer_state_bytes,
            "batch": self.batch_bytes,
        }
        if self.step.accumulate > 1:
            held["gradients"] = self.weights_bytes
        return held

    def _add_saved(self, held: dict[str, int], below: int) -> None:
        """Adds what the blocks before ``below`` keep, and the inputs of their segments."""
        kept = self.kept[:below]
        held["saved_tensors"] = sum(saved.attention + saved.mlp for saved in kept)
        held["attention_scores"] = sum(saved.scores for saved in kept)
        held["segment_inputs"] = self.stream_bytes * sum(
            1 for segment in self.segments if segment.region == "block" and segment.start < below
        )
        if not self.step.evaluate_micro_steps and self.step.accumulate > 1:
            waiting = self.step.accumulate - 1
            whole = self.kept
            held["saved_tensors"] += waiting * sum(saved.attention + saved.mlp for saved in whole)
            held["attention_scores"] += waiting * sum(saved.scores for saved in whole)

    def _loss(self) -> Moment:
        held = self._base()
        self._add_saved(held, self.model.n_layers)
        return Moment("loss", -1, held, {"logits": self.logits_bytes, "head_stream": self.stream_bytes})

    def _blocks_to_check(self) -> list[int]:
        """First and last block, and both ends of the first and last segment of a kind and of what follows it."""
        last = self.model.n_layers - 1
        blocks = {0, last}
        for segment in self.segments[:1] + self.segments[-1:]:
            blocks |= {segment.start, segment.stop - 1, min(segment.stop, last)}
        return sorted(blocks)

    def _segment_of(self, block: int) -> Segment | None:
        for segment in self.segments:
            if segment.start <= block < segment.stop:
                return segment
        return None

    def _backward(self, block: int) -> Iterator[Moment]:
        segment = self._segment_of(block)
        held = self._base()
        region = segment.region if segment else None
        self._add_saved(held, block if region != "block" or segment is None else segment.start)
        held["gradients"] = held.get("gradients", 0) + self._gradients_made(block)
        saved = self.block_saved
        remade = 0
        if region == "block" and segment is not None:
            held["segment_inputs"] += self.stream_bytes
            remade = (block - segment.start) * saved.total
        live = "recompute" if region == "block" else "saved_tensors"
        scores = "recompute" if region else "attention_scores"

        mlp = dict(held)
        mlp[live] = mlp.get(live, 0) + remade + saved.attention + saved.mlp
        if region != "attention":
            mlp[scores] = mlp.get(scores, 0) + saved.scores
        work = {"mlp_stream": self.stream_bytes, "mlp_wide": self.wide_bytes, "block_weights": self.block_weights_bytes}
        if block == self.model.n_layers - 1:
            work["head_logits"] = self.logits_bytes
        if region:
            work |= self._recompute_work()
        yield Moment("backward", block, mlp, work)

        attention = dict(held)
        attention[live] = attention.get(live, 0) + remade + saved.attention
        attention[scores] = attention.get(scores, 0) + saved.scores
        work = {
            "attention_stream": self.stream_bytes,
            "attention_scores": self.scores_bytes,
            "block_weights": self.block_weights_bytes,
        }
        if region:
            work |= self._recompute_work()
        yield Moment("backward", block, attention, work)

    def _recompute_work(self) -> dict[str, int]:
        """Recomputed tensors that wait for their weight gradients.

        Evaluation goes breadth-first, at most 20 arrays wide (``MLX_BFS_MAX_WIDTH``), so products that lead
        straight to an output lag behind the chain of the backward by a bounded number of blocks.
        """
        blocks = sum(len(segment) for segment in self.segments)
        return {
            "recomputed_stream": self.stream_bytes,
            "recomputed_wide": self.wide_bytes * min(blocks, LAG_BLOCKS) // LAG_BLOCKS,
        }

    def _gradients_made(self, block: int) -> int:
        """Gradients alive when the backward reaches ``block``: the update takes each as soon as it is complete.

        The embedding's is complete only at the end, since the head shares it. Clipping needs the norm of all,
        so all are kept.
        """
        if not self.step.clip_norm:
            return self.head_weights_bytes
        return self.head_weights_bytes + (self.model.n_layers - 1 - block) * self.block_weights_bytes

    def _update(self) -> Moment:
        held = self._base()
        made = self.weights_bytes if self.step.clip_norm else self.head_weights_bytes
        held["gradients"] = held.get("gradients", 0) + made
        return Moment("update", -1, held, {f"update_{self.step.optimizer}": self.block_weights_bytes})

    # -- single tensors and traffic --------------------------------------------------------------------

    @cached_property
    def largest_tensor_bytes(self) -> int:
        """The largest single buffer, to hold against the largest the device can make."""
        model = self.model
        matrix = max(model.vocab_size * model.d_model, model.context * model.d_model, model.d_model * model.d_mlp)
        return max(
            self.scores_bytes, self.wide_bytes, self.logits_bytes, self.stream_bytes, matrix * self.step.item_bytes
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
