"""What every value of a configuration is: frozen, and refused in words that name the field and what would work."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from oomguard.config.problems import say_problem

# MLX counts the elements of a dimension in 32 bits.
Positive = Annotated[int, Field(gt=0, lt=1 << 31)]


# A memory is counted in bytes, and those in 64 bits: 2 GiB is one more than ``Positive`` holds.
MemoryBytes = Annotated[int, Field(gt=0, lt=1 << 63)]


class Frozen(BaseModel):
    """Base of every value at the edges: immutable, no unknown field passes unseen."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def first_problem(error: ValidationError) -> str:
    """The first failure of a validation, as one line that names the field, the value and what would work."""
    problem = error.errors()[0]
    said = say_problem(problem)
    if problem["type"] == "extra_forbidden":
        said += _near_field(error.title, problem["loc"])
    # A union adds which of its members refused ("constrained-int"): no field of ours, and no word for a user.
    where = ".".join(
        str(part) for part in problem["loc"] if str(part).isidentifier() or isinstance(part, int)
    )
    return f"{where}: {said}" if where else said


def _near_field(model_name: str, loc: tuple[str | int, ...]) -> str:
    """``; did you mean n_heads?`` where a model of ours has a field of nearly that name."""
    import difflib

    model = next((model for model in Frozen.__subclasses__() if model.__name__ == model_name), None)
    if model is None or len(loc) != 1:
        return ""
    names = [field.alias or name for name, field in model.model_fields.items()]
    near = difflib.get_close_matches(str(loc[0]), names, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else f"; the fields are {', '.join(names)}"
