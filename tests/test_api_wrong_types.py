"""The public Python functions given values of every wrong kind: an answer, or one line that says what works."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import oomguard
from oomguard.errors import InputError, OomguardError
from oomguard.plan.planner import Plan

DEVICE = "cpu-16gb"


ABSURD: dict[str, Any] = {
    "3": 3,
    "-1": -1,
    "0": 0,
    "2.5": 2.5,
    "nan": math.nan,
    "inf": math.inf,
    "1e400 whole": 10**400,
    "True": True,
    "None": None,
    "empty text": "",
    "text": "x",
    "text with NUL": "a\0b.json",
    "bytes": b"tiny",
    "list": [],
    "list of itself": (nested := []),
    "dict": {},
    "dict of numbers": {3: 4},
    "object": object(),
    "class": int,
    "function": lambda *_: None,
    "path": Path("nowhere.json"),
    "array": mx.array([1, 2]),
    "module": nn.Linear(2, 2),
}
nested.append(nested)


def plan_of(**settings: Any) -> Plan:
    return oomguard.plan(**{"model": "tiny", "device": DEVICE, "memory": "1GB", **settings})


def largest_of(**settings: Any) -> int:
    return oomguard.largest_batch(**{"model": "tiny", "device": DEVICE, "memory": "1GB", **settings})


def trace_of(step: Any = lambda x: x + 1, **settings: Any) -> Any:
    return oomguard.trace(step, mx.zeros((4,)), **{"device": "cpu", **settings})


def guard_of(**settings: Any) -> Any:
    return oomguard.Guard(**{"budget_bytes": 1 << 30, **settings})


def checkpoint_of(**settings: Any) -> None:
    layers = [nn.Linear(2, 2) for _ in range(2)]
    oomguard.checkpoint_layers(**{"layers": layers, "policy": "every", **settings}).undo()


def parameters(function: Callable[..., Any], *left_out: str) -> list[str]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = inspect.signature(function).parameters.values()
    return [each.name for each in found if each.kind in named and each.name not in left_out]


def trace_parameters() -> list[str]:
    from oomguard.trace.engine import trace

    return parameters(trace, "rewrite", "marked")  # for what is built on the trace, not for a step's owner


CALLS: list[tuple[Callable[..., Any], str]] = [
    *((plan_of, name) for name in parameters(oomguard.plan)),
    *((largest_of, name) for name in parameters(oomguard.plan)),
    *((trace_of, name) for name in trace_parameters()),
    *((guard_of, name) for name in parameters(oomguard.Guard)),
    *((oomguard.Guard.of, name) for name in parameters(oomguard.Guard.of)),
    *((checkpoint_of, name) for name in parameters(oomguard.checkpoint_layers)),
]


@pytest.mark.parametrize(("call", "name"), CALLS, ids=[f"{call.__name__}-{name}" for call, name in CALLS])
def test_public_function_answers_a_value_of_any_type_or_refuses_it_in_one_line(
    call: Callable[..., Any], name: str
) -> None:
    others = {"plan": plan_of()} if call == oomguard.Guard.of and name != "plan" else {}
    for kind, value in ABSURD.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call(**{**others, name: value})
        except OomguardError as error:
            said = str(error)
            assert said, kind
            assert "\n" not in said, (kind, said)
            assert "Input should" not in said, (kind, said)
            assert len(said) < 600, (kind, said)
        except Exception as error:
            pytest.fail(f"{call.__name__}({name}={kind}) raised {type(error).__name__}: {error}")


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (
            lambda: oomguard.plan(3),
            "model is 3 (int); give a preset's name, a config's path, a dictionary or",
        ),
        (lambda: oomguard.plan("tiny", dtype=3), "unknown dtype 3; choose fp32, bf16 or fp16"),
        (lambda: oomguard.plan("tiny", optimizer=3), "unknown optimizer 3; choose sgd, adam, "),
        (lambda: oomguard.plan("tiny", device=3), "unknown device 3; write metal, cpu or cuda"),
        (lambda: oomguard.plan("tiny", grad_checkpoint=3), "3 is not a checkpoint policy; choose auto, none"),
        (lambda: oomguard.plan("tiny", engine=None), "unknown engine None; choose estimate, trace, auto"),
        (lambda: oomguard.plan("tiny", clip_norm="yes"), "clip_norm is 'yes' (str); give True or False"),
        (lambda: oomguard.trace(3), "step is 3 (int); give the function that makes one training step"),
        (lambda: oomguard.trace(abs, state=nn.Linear(1, 1)), "give a list, state=[...]"),
        (lambda: oomguard.Guard("4GB"), "budget_bytes is '4GB' (str); give a whole number of bytes"),
        (lambda: oomguard.Guard.of(None), "plan is None; give what oomguard.plan(...) returns"),
        (
            lambda: oomguard.checkpoint_layers(3, "every"),
            "layers is 3 (int); give the list of a model's layers",
        ),
    ],
)
def test_wrong_type_is_named_with_what_works(ask: Callable[[], object], said: str) -> None:
    with pytest.raises(InputError) as caught:
        ask()
    assert said in str(caught.value)
