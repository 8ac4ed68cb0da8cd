"""Calibrated coefficients with their provenance: what was fitted, on which rows, and how far off it was.

A profile belongs to one backend and MLX version. Within it compiled and eager steps are fitted apart: they
run different kernels. Every coefficient scales what ``inventory.py`` counts at one kind of moment, and is 1
where the count is what a device really holds.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from oomguard.config.base import Frozen, first_problem
from oomguard.config.step import StepConfig
from oomguard.errors import InputError
from oomguard.files.reading import parse_json, read_text

SCHEMA = "oomguard.coefficients/1"

Scale = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Mode(Frozen):
    """Coefficients of compiled, or of eager, steps.

    ``alive`` scales what kernels have made at the moments of a kind (``loss``, ``last``, ``inner``, ``end``);
    ``in_flight`` what they dropped and is not yet released there, and ``window`` what Metal's open command
    buffers can hold. ``sequenced`` is the share still in flight where evaluation waits for every task.
    Errors are leave-one-out: each row predicted by a fit without it. ``low`` and ``high`` multiply an
    estimate into its band; ``bands`` holds narrower or wider ones by ``step_kind``, where enough rows were
    measured.
    """

    alive: dict[str, Scale]
    in_flight: dict[str, Scale]
    sequenced: Scale
    rows: Annotated[int, Field(gt=0)]
    median_error: Share
    worst_error: Share
    low: Share
    high: Share
    bands: dict[str, tuple[Share, Share]] = Field(default_factory=dict)

    def band(self, step: StepConfig) -> tuple[float, float]:
        """What multiplies an estimate of such a step into its band."""
        return self.bands.get(step_kind(step), (self.low, self.high))


def step_kind(step: StepConfig) -> str:
    """Steps that are estimated alike well: the plain ones, and what sets each other kind apart."""
    if step.accumulate > 1 and not step.evaluate_micro_steps:
        return "micro-batches in one graph"
    if step.checkpoint.policy == "stride":
        return "segments"
    if step.clip_norm or step.optimizer in ("lion", "adafactor", "muon"):
        return "late update"
    return "plain" if step.dtype == "float32" else "half precision"


class Speed(Frozen):
    """Time of a step: floating-point operations over one rate, plus bytes over the other.

    ``flops_per_second`` is by dtype: a CPU multiplies half-precision matrices without its fast library.
    """

    flops_per_second: dict[str, Rate]
    bytes_per_second: Rate
    rows: Annotated[int, Field(gt=0)]
    median_error: Share


class Coefficients(Frozen):
    """One calibrated profile."""

    schema_: Literal["oomguard.coefficients/1"] = Field(default="oomguard.coefficients/1", alias="schema")
    profile: str
    backend: Literal["cpu", "metal", "cuda"]
    mlx: str
    device: str
    rows: Annotated[int, Field(gt=0)]
    median_error: Share
    worst_error: Share
    compiled: Mode
    eager: Mode
    speed: Speed
    cache_bytes: Annotated[int, Field(ge=0)]
    ranges: dict[str, tuple[float, float]]
    passed_over: str = Field(default="", exclude=True)
    """Why this machine's own calibration is not used, where it should be; never in a file."""

    def mode(self, compiled: bool) -> Mode:
        return self.compiled if compiled else self.eager


def data_dir() -> Path:
    """Where this user's calibration lives; ``OOMGUARD_HOME`` overrides the platform's data folder."""
    if home := os.environ.get("OOMGUARD_HOME"):
        return Path(home)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "oomguard"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "oomguard"


def local_rows_path() -> Path:
    """Rows measured on this machine: by ``calibrate``, and by every training run that may be learnt from."""
    return data_dir() / "rows.jsonl"


def local_path(backend: str) -> Path:
    """Coefficients ``oomguard calibrate`` fitted on this machine."""
    return data_dir() / f"coefficients-{backend}.json"


def read_coefficients(path: str | Path) -> Coefficients:
    """Coefficients from a file.

    Raises:
        InputError: unreadable, damaged, or not a coefficients file; the text says how to go on without it.
    """
    return _parse(read_text(path, "coefficients"), str(path))


def _parse(text: str, where: str) -> Coefficients:
    again = "delete it, or run `oomguard calibrate` to make it again"
    try:
        value = parse_json(text)
    except ValueError as error:
        raise InputError(f"coefficients file {where} is damaged ({error}); {again}") from error
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise InputError(f"{where} is not a coefficients file of schema {SCHEMA}; {again}")
    try:
        return Coefficients.model_validate(value)
    except ValidationError as error:
        raise InputError(f"coefficients file {where}: {first_problem(error)}; {again}") from error


@cache
def shipped(backend: str) -> Coefficients:
    """The coefficients that ship for a backend; cuda, where nothing was measured, uses the cpu's graph."""
    name = "metal" if backend == "metal" else "cpu"
    return _parse(resources.files("oomguard").joinpath(f"data/coefficients/{name}.json").read_text(), name)


NEWEST_MLX = "0.32.4"
"""The newest release of MLX that oomguard knows: what a Mac that is asked about from elsewhere is taken to run."""


def release_warning(coefficients: Coefficients, backend: str, mlx: str | None) -> str | None:
    """What is to be said of an estimate for a release of MLX that its coefficients were not fitted to.

    Args:
        coefficients: what the estimate rests on.
        backend: of the machine asked about.
        mlx: the release that runs there; None where nobody can know.
    """
    fitted = coefficients.mlx
    if mlx is None and backend == "metal" and fitted and fitted != NEWEST_MLX:
        return (
            f"estimated for MLX {fitted}, which the coefficients were fitted to; {NEWEST_MLX} fuses attention in "
            "training on Metal and holds other arrays: --engine auto simulates that, in plan, and oomguard trace any "
            "step"
        )
    if mlx is not None and fitted and fitted != mlx:
        return (
            f"the coefficients were fitted on MLX {fitted}, here is {mlx}; "
            "oomguard calibrate fits them to this machine, --engine auto simulates the step"
        )
    return None


def load(backend: str, *, mlx_version: str | None = None, device: str | None = None) -> Coefficients:
    """This machine's own calibration if there is one for it, else the shipped profile of the backend.

    A local file that cannot be used is passed over, and ``passed_over`` of what is returned says why: a plan needs no
    file of the user's to be whole.

    Args:
        backend: ``cpu``, ``metal`` or ``cuda``.
        mlx_version: the installed MLX; a local calibration of another version is passed over.
        device: the device planned for; a local calibration of another device is passed over.
    """
    path = local_path(backend)
    if path.exists():
        try:
            local = read_coefficients(path)
        except InputError as error:
            return shipped(backend).model_copy(
                update={"passed_over": f"{error}; the shipped coefficients are used"}
            )
        same_mlx = mlx_version is None or local.mlx == mlx_version
        same_device = device is None or local.device == device
        if local.backend == backend and same_mlx and same_device:
            return local
    return shipped(backend)
