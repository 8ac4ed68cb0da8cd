"""What a validation finds wrong is said in this program's words, for every field of every model."""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
from collections.abc import Iterator

import pytest
from pydantic import ValidationError

import oomguard.calibration
import oomguard.measure
import oomguard.model
from oomguard.config.base import Frozen, first_problem
from oomguard.config.model import ModelConfig
from oomguard.config.problems import PROBLEMS, shown

PYDANTIC = re.compile(
    r"Input should|Field required|Extra inputs|unable to parse|valid (integer|string|number|dictionary)|pydantic"
)
ABSURD = [
    None,
    True,
    -1,
    0,
    10**30,
    1.5,
    -2.5,
    math.nan,
    math.inf,
    "",
    "x",
    "NaN",
    [],
    [1],
    {},
    {"x": 1},
    (),
    b"x",
]
ABSURD += [object(), "y" * 500, {"policy": "stride"}, [None, None, None], {1: 2}, "a\nb"]


def models() -> list[type[Frozen]]:
    """Every model of the package."""
    for package in (oomguard, oomguard.measure, oomguard.model, oomguard.calibration):
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    found: list[type[Frozen]] = []
    waiting = list(Frozen.__subclasses__())
    while waiting:
        model = waiting.pop()
        found.append(model)
        waiting += model.__subclasses__()
    return [model for model in found if model.__module__.startswith("oomguard")]


def refusals(model: type[Frozen]) -> Iterator[ValidationError]:
    """What the model says of every absurd value in every field, of a field too many, and of no field at all."""
    names = [field.alias or name for name, field in model.model_fields.items()]
    for value in [{}, {"no such field": 1}, None, 3, "x", []]:
        yield from refused(model, value)
    for name in names:
        for value in ABSURD:
            yield from refused(model, {name: value})


def refused(model: type[Frozen], value: object) -> Iterator[ValidationError]:
    try:
        model.model_validate(value)
    except ValidationError as error:
        yield error


@pytest.mark.parametrize("model", models(), ids=lambda model: model.__name__)
def test_no_problem_of_any_field_is_said_in_words_of_pydantic(model: type[Frozen]) -> None:
    seen = 0
    for error in refusals(model):
        for number, problem in enumerate(error.errors()):
            assert problem["type"] in {*PROBLEMS, "value_error"}, problem
            if number == 0:
                said = first_problem(error)
                assert not PYDANTIC.search(said), said
                assert "\n" not in said
                assert len(said) < 700
                seen += 1
    assert seen > 5


def test_models_of_all_rooms_are_walked() -> None:
    names = {model.__name__ for model in models()}
    assert {"ModelConfig", "StepConfig", "CheckpointPolicy", "Row", "Header", "Coefficients", "Task"} <= names
    assert {"RunSettings", "Progress"} <= names


def test_limit_of_a_whole_number_is_the_last_one_that_works() -> None:
    shape = {"n_layers": 1, "d_model": 4, "n_heads": 1, "d_mlp": 4, "context": 4}
    for field, value, said in (
        ("context", 0, "context: 0 is too small; the least is 1"),
        ("context", 2**31, "context: 2147483648 is too large; the most is 2147483647"),
        ("n_layers", 10_001, "n_layers: 10001 is too large; the most is 10000"),
        ("dropout", -0.5, "dropout: -0.5 is too small; the least is 0"),
    ):
        with pytest.raises(ValidationError) as caught:
            ModelConfig.model_validate({**shape, field: value})
        assert first_problem(caught.value) == said
        limit = re.search(r"(?:least|most) is (\S+)", said)
        assert limit is not None
        assert ModelConfig.model_validate({**shape, field: float(limit[1])})


def test_long_value_is_cut() -> None:
    assert shown("y" * 500) == "'" + "y" * 36 + "..."
    assert shown("a\nb") == r"'a\nb'"
