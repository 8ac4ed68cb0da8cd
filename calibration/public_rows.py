"""How a published peak is read: what its report says, and how what it leaves open is filled.

Rows are of three kinds, in ``public_peaks.jsonl`` and ``public_peaks_2.jsonl``:

- a LoRA run names a model, a quantization, the LoRA layers and the batch;
- a run from scratch names the depth, the width and the MLP of a small GPT (``scratch_gpt``);
- an operation names its sizes (``published_ops``).

What a report leaves open is filled with the default of its source and date; ``assumed`` says what else had to be.
Besides what it ran a row can say:

``version``          ``mlx 0.32.0``, or a date
``attention``        ``fused`` or ``decomposed`` in training, whatever its release has
``cross_entropy``    the same of the loss
``accumulate``       micro-batches of an update
``evalB``            sequences of an evaluation, whose peak counts as well
``compiled``         false for a step without ``mx.compile``
``actual_T``         tokens; ``at most 2048`` where no batch was longer: what is predicted is a bound, and no estimate
``machine``          its memory gives MLX's memory limit; ``memory_limit`` (``24GB``) is one that was set
``unit``             ``GB``, ``GiB``, ``MiB``, and ``GiB above inputs`` where the arguments do not count
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from oomguard.calibration import published_ops
from oomguard.calibration.scratch_gpt import Activation, ScratchConfig
from oomguard.config.policy import EVERY_BLOCK, NO_CHECKPOINT, CheckpointPolicy
from oomguard.errors import InputError
from oomguard.machine.device import find_device
from oomguard.trace.lower import Version, parse_version
from oomguard.trace.memory import Device
from oomguard.trace.metal import Chip, device
from oomguard.units import parse_bytes

ROWS = Path(__file__).parent / "public_peaks.jsonl"
MORE_ROWS = Path(__file__).parent / "public_peaks_2.jsonl"

CHIP_SIZES = {"Pro": "s", "Max": "s", "Ultra": "d", "": "g"}
GENERATIONS = {"M1": 13, "M2": 14, "M3": 15, "M4": 16, "M5": 17}
DEFAULT_RANK = 8
SCRIPT_TOKENS = 1 << 16  # of an update, in the script that runs from scratch go back to
DEFAULT_MLX: Version = (0, 31, 2)

RELEASES: dict[str, Version] = {
    "2024-11": (0, 21, 0),
    "2025-01": (0, 22, 0),
    "2025-03": (0, 23, 2),
    "2025-04": (0, 24, 2),
    "2025-05": (0, 25, 1),
    "2025-06": (0, 26, 0),
    "2025-07": (0, 26, 2),
    "2025-08": (0, 27, 1),
    "2025-09": (0, 29, 0),
    "2025-10": (0, 29, 2),
    "2025-11": (0, 29, 4),
    "2025-12": (0, 30, 0),
    "2026-01": (0, 30, 3),
    "2026-02": (0, 30, 5),
    "2026-03": (0, 31, 1),
    "2026-04": (0, 31, 2),
    "2026-05": (0, 32, 0),
    "2026-08": (0, 32, 1),
    "2026-09": (0, 32, 2),
}
"""What was installed from the beginning of a month on, from the dates on which MLX's version was raised."""

ALL_LINEAR_SINCE = "2025-09-30"
"""Since then mlx-lm adapts every linear layer where no keys are given; before, queries and values."""
QUERY_VALUE = ("self_attn.q_proj", "self_attn.v_proj")


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published peak, with every blank filled in: what rows of every kind say.

    Attributes:
        id, name: of the report.
        peak_bytes: as reported.
        above_inputs: the arguments of the operation are not in it.
        batch, tokens: of one call; tokens as the model sees them.
        at_most: no sequence had more tokens; what is predicted is a bound of what was reported.
        fused_attention, fused_cross_entropy: in training; None for as the release has it.
        memory_limit: in bytes; MLX's own where none was set; None where the memory is not known.
        assumed: what the report leaves open, and how it was filled; empty where nothing was.
    """

    id: str
    name: str
    peak_bytes: int
    above_inputs: bool = False
    batch: int
    tokens: int
    at_most: bool = False
    chip: Chip
    mlx: Version
    fused_attention: bool | None = None
    fused_cross_entropy: bool | None = None
    memory_limit: int | None = None
    assumed: str = ""

    @property
    def device(self) -> Device:
        """What is simulated for it."""
        return device(
            self.chip,
            self.mlx,
            memory_limit=self.memory_limit,
            fused_attention=self.fused_attention,
            fused_cross_entropy=self.fused_cross_entropy,
        )

    @property
    def how(self) -> str:
        """What there is to say of it in a word, for a table."""
        return ""


@dataclass(frozen=True, kw_only=True)
class PublicRow(Published):
    """A LoRA run.

    Attributes:
        bits, group_size: of the quantized weights; bits is None where they are not quantized.
        layers: how many of the last blocks are trained; -1 for all.
        method: ``lora``, ``dora`` or ``full``.
        keys: of the adapted linear layers; None for every one.
        recompute: every block is recomputed.
        accumulate: micro-batches of an update.
        evaluation_batch: of a loss without gradient whose peak counts as well; None for none.
        compiled: the step is compiled, as mlx-lm's is.
    """

    architecture: str
    bits: int | None
    group_size: int
    layers: int
    method: str
    rank: int
    keys: tuple[str, ...] | None
    recompute: bool
    optimizer: str
    accumulate: int = 1
    evaluation_batch: int | None = None
    compiled: bool = True

    @property
    def policy(self) -> CheckpointPolicy:
        return EVERY_BLOCK if self.recompute else NO_CHECKPOINT

    @property
    def how(self) -> str:
        return str(self.policy)


@dataclass(frozen=True, kw_only=True)
class ScratchRow(Published):
    """A run from scratch: its peak is that of a training step or, with a larger batch, of an evaluation."""

    config: ScratchConfig
    accumulate: int
    evaluation_batch: int | None

    @property
    def how(self) -> str:
        return self.config.activation


@dataclass(frozen=True, kw_only=True)
class OpRow(Published):
    """An operation, and how to build it."""

    build: Callable[[], published_ops.Op]

    @property
    def how(self) -> str:
        return "op"


def read_public_rows(path: Path = ROWS) -> list[dict[str, Any]]:
    """The rows as published."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def all_public_rows() -> list[dict[str, Any]]:
    """The rows that ship, as published."""
    return [*read_public_rows(ROWS), *read_public_rows(MORE_ROWS)]


def understood_all(rows: list[dict[str, Any]]) -> list[Published]:
    """Those of the rows whose sequence length is stated."""
    return [found for row in rows if (found := read_published(row)) is not None]


def read_published(row: dict[str, Any]) -> Published | None:
    """A row of any kind; None where the sequence length is not stated.

    Raises:
        InputError: something it says cannot be read.
    """
    kind = str(row.get("kind", ""))
    if kind.startswith("op"):
        return _operation(row)
    if kind == "from-scratch":
        return _from_scratch(row)
    return understood(row)


def understood(row: dict[str, Any]) -> PublicRow | None:
    """A LoRA row with mlx-lm's defaults where it is silent; None where the sequence length is not stated.

    Raises:
        InputError: something else it says cannot be read.
    """
    tokens = _stated_tokens(row)
    if tokens is None:
        return None
    quantization = str(row.get("quant", row["model"]))
    bits = re.search(r"(\d)-?bit", quantization)
    group = re.search(r"\bg(?:roup )?(\d+)\b", quantization)
    return PublicRow(
        **_common(row),
        tokens=tokens,
        at_most=_AT_MOST.match(str(row.get("actual_T"))) is not None,
        architecture=row["arch"],
        bits=int(bits[1]) if bits else None,
        group_size=int(group[1]) if group else 64,
        layers=-1 if str(row["layers"]) in ("-1", "all") else _first_number(row["layers"]),
        method=_method(str(row.get("ft", "lora"))),
        rank=row.get("rank", DEFAULT_RANK),
        keys=_keys(str(row.get("keys", "")), str(row.get("version", ""))),
        recompute=bool(row["ckpt"]),
        optimizer=str(row.get("optimizer", "adam")),
        accumulate=row.get("accumulate", 1),
        evaluation_batch=row.get("evalB"),
        compiled=row.get("compiled", True),
    )


def _from_scratch(row: dict[str, Any]) -> ScratchRow:
    """A run of the script's model: four blocks of 64 times as many channels as blocks, an MLP of four times the width,
    relu squared, no bound of the logits, and 65,536 tokens an update, where the report says nothing else.
    """
    text = str(row["model"])
    depth = _said(r"depth ?(\d+)", text, 4)
    activation: Activation = "silu" if "silu" in text.lower() else "relu2"
    config = ScratchConfig(
        depth=depth,
        dim=_said(r"dim ?(\d+)", text, 64 * depth),
        mlp=_said(r"MLP ?x ?(\d+)", text, 4),
        activation=activation,
        logit_cap="logit cap" in text,
        vocab=row["vocab"],
        tokens=row["actual_T"],
    )
    common = _common(row)
    micro_batches = max(1, SCRIPT_TOKENS // (common["batch"] * config.tokens))
    return ScratchRow(
        **common,
        tokens=config.tokens,
        config=config,
        accumulate=row.get("accumulate", micro_batches),
        evaluation_batch=row.get("evalB"),
    )


def _operation(row: dict[str, Any]) -> OpRow:
    """An operation by what its report calls it.

    Raises:
        InputError: none of that name is known.
    """
    batch, tokens, text = row["batch"], row["actual_T"], f"{row['model']}, {row.get('kind')}, {row['note']}"
    backward = "bwd" in text
    if "linear+CE" in text:
        dim, vocab = _said(r"\bD=(\d+)", text), _said(r"\bV=(\d+)", text)
        build = partial(published_ops.linear_cross_entropy, batch * tokens, dim, vocab)
    elif "gated_delta" in text:
        build = partial(
            published_ops.gated_delta,
            tokens,
            key_heads=_said(r"\bHk(\d+)", text),
            value_heads=_said(r"\bHv(\d+)", text),
            dim=_said(r"\bD(\d+)", text),
            segment=_said(r"checkpointed (\d+)", text),
        )
    elif "attention" in text:
        heads, kv_heads, dim = (int(n) for n in _found(r"(\d+)/(\d+) heads x ?(\d+)", text))
        if "math_attention" in text:
            build = partial(
                published_ops.plain_attention, batch, tokens, heads, kv_heads, dim, backward=backward
            )
        else:
            masked = "array mask" in text
            build = partial(published_ops.fast_attention, batch, tokens, heads, kv_heads, dim, masked=masked)
    else:
        raise InputError(
            f"no operation is known for {row['model']!r}; known are attention, linear+CE, gated_delta"
        )
    return OpRow(**_common(row), tokens=tokens, build=build)


def _common(row: dict[str, Any]) -> dict[str, Any]:
    """What ``Published`` holds, but the tokens."""
    unit = str(row.get("unit", "GB"))
    if "reported" in row:
        peak = parse_bytes(f"{row['reported']}{unit.split()[0]}")
    else:
        peak = int(row.get("peak_bytes") or row["peak_gb"] * 10**9)
    return {
        "id": row["id"],
        "name": row["model"],
        "peak_bytes": peak,
        "above_inputs": "above inputs" in unit,
        "batch": _first_number(row["batch"]),
        "chip": _chip(str(row.get("machine", ""))),
        "mlx": _version(str(row.get("version", ""))),
        "fused_attention": _fused(row, "attention"),
        "fused_cross_entropy": _fused(row, "cross_entropy"),
        "memory_limit": _memory_limit(row),
        "assumed": str(row.get("assumed", "")),
    }


def _fused(row: dict[str, Any], key: str) -> bool | None:
    """Whether a part of the step is said to be fused, in a field or, of attention, in the report's words."""
    said = row.get(key)
    if (
        said is None
        and key == "attention"
        and "fused attention with a fused backward" in str(row.get("note", ""))
    ):
        return True
    if said not in (None, "fused", "decomposed"):
        raise InputError(f"{key} {said!r} is neither fused nor decomposed")
    return None if said is None else said == "fused"


def _memory_limit(row: dict[str, Any]) -> int | None:
    """The memory limit that was set, or MLX's own of the machine."""
    if "memory_limit" in row:
        return parse_bytes(row["memory_limit"])
    stated = row.get("ram_gb")
    gib = stated if isinstance(stated, int) else _said(r"(\d+) ?GB\b", str(row.get("machine", "")), 0)
    return find_device(f"metal-{gib}gb").memory_limit_bytes if gib else None


def _found(pattern: str, text: str) -> tuple[str, ...]:
    found = re.search(pattern, text)
    if found is None:
        raise InputError(f"{text!r} does not say {pattern}")
    return found.groups()


def _said(pattern: str, text: str, default: int | None = None) -> int:
    """The number a report gives, or the default."""
    if default is not None and not re.search(pattern, text):
        return default
    return int(_found(pattern, text)[0])


_AT_MOST = re.compile(r"at most (\d+)")


def _stated_tokens(row: dict[str, Any]) -> int | None:
    """The tokens the model sees of a sequence, where the report says so.

    It gives them, or the length that its batches are cut at and reach. A batch is padded to its longest sequence;
    the model sees one token less, because inputs and targets are the sequence without its last and without its
    first token.
    """
    actual, most = row.get("actual_T"), row.get("max_seq")
    if isinstance(actual, int):
        return actual
    if bound := _AT_MOST.match(str(actual)):
        return int(bound[1])
    if most is None or not re.match(r"$|<=|truncated at", str(actual or "")):
        return None
    return int(most) - 1


def _method(text: str) -> str:
    found = re.match(r"lora|dora|full", text.lower())
    if found is None:
        raise InputError(f"{text!r} is not a way to fine-tune; write lora, dora or full")
    return found[0]


def _first_number(value: Any) -> int:
    found = re.search(r"\d+", str(value))
    if found is None:
        raise InputError(f"{value!r} names no number")
    return int(found[0])


def _keys(text: str, version: str) -> tuple[str, ...] | None:
    """LoRA keys: those named by letter, or the default of the report's date, where None is every linear layer."""
    letters = re.match(r"^([qkvo](?:,[qkvo])*)\b", text)
    if letters:
        return tuple(f"self_attn.{letter}_proj" for letter in letters[1].split(","))
    date = _date(version)
    before = not text and date is not None and date < ALL_LINEAR_SINCE
    return QUERY_VALUE if before else None


def _date(version: str) -> str | None:
    """The date in a report's words on its release: ``2025-06``, ``2026-04-01``."""
    found = re.search(r"\b20\d\d-\d\d(?:-\d\d)?\b", version)
    return found[0] if found else None


def _chip(machine: str) -> Chip:
    found = re.match(r"(M\d)\s*(Pro|Max|Ultra)?", machine)
    if not found:
        return Chip(16, "s")
    return Chip(GENERATIONS[found[1]], CHIP_SIZES[found[2] or ""])


def _version(text: str) -> Version:
    """The MLX release a report names, or that of its date; without either, that of early 2026."""
    found = re.search(r"mlx (\d+\.\d+\.\d+)", text)
    if found:
        return parse_version(found[1])
    date = _date(text)
    known = [release for month, release in RELEASES.items() if date is not None and month <= date]
    return known[-1] if known else DEFAULT_MLX
