"""The step that a user's FILE.py:FUNCTION builds: one door for what traces it and what runs it."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from oomguard.config.words import near_names
from oomguard.errors import InputError, OomguardError

CONVENTION = "(step, arguments), (step, arguments, state) or (step, arguments, state, evaluate)"
BUILT = ("graphs", "function", "state", "model", "batch", "run")
"""What an object has that says itself which calls an update makes: ``oomguard.model.step.BuiltStep``."""


class FileRaisedError(InputError):
    """The user's own file raised; what it raised is the cause."""


def returned_then_state(returned: Any, state: list[Any]) -> Any:
    """``mx.eval(returned, state)``: the default order."""
    return returned, state


@dataclass(frozen=True)
class UserStep:
    """A step to trace or to run.

    Attributes:
        step: plain or compiled.
        arguments, keywords: what to call it with.
        state: what it updates; None to find it.
        evaluate: what the loop hands to ``mx.eval``, given what the step returned and the state; in that order.
        alone: the step came without anything, and takes no arguments: it may evaluate what it makes itself.
        built: an object like ``oomguard.model.step.BuiltStep``, instead of the rest.
    """

    step: Callable[..., Any] | None = None
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)
    state: list[Any] | None = None
    evaluate: Callable[[Any, list[Any]], Any] = returned_then_state
    alone: bool = False
    built: Any = None


def load_step(target: str) -> UserStep:
    """Imports FILE.py, calls FUNCTION without arguments and reads what it returns.

    FUNCTION returns ``(step, arguments)``, ``(step, arguments, state)`` or ``(step, arguments, state, evaluate)``:
    ``step`` is the function a training loop calls, plain or compiled; ``arguments`` a tuple of what it is called with,
    or a dictionary of keyword arguments; ``state`` a list of what it updates, ``[model, optimizer]``, where it is
    not found by itself; ``evaluate`` a function of what the step returned and of the state that gives what the loop
    hands to ``mx.eval``. A step without arguments can be returned alone. An object that has ``BUILT``, as
    ``oomguard.model.step.build_step`` gives, is taken call by call.

    Raises:
        InputError: no such file or function, it raises, or it returns something else.
    """
    path, name = _split(target)
    function = _find(_import(path), path, name)
    with _explained(path, f"{path.name}:{name} raised"):
        returned = function()
    return _read(returned, f"{path.name}:{name}")


def _split(target: str) -> tuple[Path, str]:
    file, colon, name = target.rpartition(":")
    if not colon or not name.isidentifier():
        raise InputError(
            f"{target!r} names no step; write FILE.py:FUNCTION, where FUNCTION returns {CONVENTION}"
        )
    path = Path(file)
    if path.suffix != ".py":
        raise InputError(f"{file} is not a Python file; write FILE.py:{name}")
    if not path.is_file():
        raise InputError(f"no file {path}")
    return path, name


def _import(path: Path) -> ModuleType:
    """Runs the file as ``import`` would; its own folder is where it looks for modules first."""
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # never in place of a module that is in use
    sys.path.insert(0, str(path.resolve().parent))
    with _explained(path, f"importing {path.name} raised"):
        spec.loader.exec_module(module)
    return module


def _find(module: ModuleType, path: Path, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if function is None:
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        hint = near_names(name, known) if known else "it defines none"
        raise InputError(f"{path.name} has no function {name!r}; {hint}")
    if not callable(function):
        raise InputError(f"{path.name}:{name} is {_kind(function)}, not a function")
    needed = _needed(function)
    if needed:
        raise InputError(
            f"{path.name}:{name} takes arguments ({', '.join(needed)}); name the function that builds the "
            f"step and returns {CONVENTION}"
        )
    return function  # type: ignore[no-any-return]


def _needed(function: Callable[..., Any]) -> list[str]:
    """Parameters that have no default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable]


@contextlib.contextmanager
def _explained(path: Path, what: str) -> Iterator[None]:
    """One line for whatever the user's file raises, with the place in it."""
    try:
        yield
    except OomguardError:
        raise
    except SyntaxError as error:
        raise FileRaisedError(f"{path.name}, line {error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        lines = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path.resolve())]
        where = f" at line {lines[-1].lineno} (`{lines[-1].line}`)" if lines else ""
        text = " ".join(str(error).split())
        said = f"{what} {type(error).__name__}{where}" + (f": {text}" if text else "")
        raise FileRaisedError(said) from error


def _read(returned: Any, name: str) -> UserStep:
    if all(hasattr(returned, attribute) for attribute in BUILT):
        return UserStep(built=returned)
    if isinstance(returned, tuple) and 2 <= len(returned) <= 4:
        step, arguments, state, evaluate = (*returned, None, None)[:4]
        if not callable(step):
            raise InputError(f"{name} returned {_kind(step)} where the step should be; return {CONVENTION}")
        if evaluate is not None and not callable(evaluate):
            raise InputError(
                f"{name}: what is handed to mx.eval is {_kind(evaluate)}; return a function of what the step returned "
                "and of the state, such as lambda loss, state: (loss, state)"
            )
        user = _with_arguments(step, arguments, _read_state(state, name), name)
        return user if evaluate is None else replace(user, evaluate=evaluate)
    if callable(returned):
        return UserStep(step=returned, alone=True)
    if missing := _missing(returned):
        raise InputError(f"{name} returned {_kind(returned)}, which has no {missing}; return {CONVENTION}")
    raise InputError(f"{name} returned {_said(returned)}; return {CONVENTION}")


def _missing(returned: Any) -> str:
    """What an object lacks that has most of ``BUILT``."""
    missing = [attribute for attribute in BUILT if not hasattr(returned, attribute)]
    return " and no ".join(missing) if len(missing) <= len(BUILT) // 2 else ""


def _with_arguments(step: Any, arguments: Any, state: list[Any] | None, name: str) -> UserStep:
    if isinstance(arguments, tuple | list):
        return UserStep(step=step, arguments=tuple(arguments), state=state)
    if isinstance(arguments, dict) and all(isinstance(key, str) for key in arguments):
        return UserStep(step=step, keywords=arguments, state=state)
    raise InputError(
        f"{name}: the step's arguments are {_kind(arguments)}; return them as a tuple, (step, (batch,)), "
        "or as a dictionary of keyword arguments"
    )


def _read_state(state: Any, name: str) -> list[Any] | None:
    if state is None or isinstance(state, list | tuple):
        return None if state is None else list(state)
    raise InputError(f"{name}: the state is {_kind(state)}; return it as a list, [model, optimizer]")


def _said(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"{len(value)} values" if isinstance(value, tuple) else _kind(value)


def _kind(value: Any) -> str:
    module = type(value).__module__
    return type(value).__name__ if module == "builtins" else f"{module}.{type(value).__name__}"
