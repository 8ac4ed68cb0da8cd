"""A package that can be called, so that ``oomguard.plan(...)`` works and ``oomguard.plan.search`` can be imported."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any


def call_as(package: str, module: str, function: str) -> None:
    """Lets a package be called as one of its functions, which is imported when it is first asked for.

    Args:
        package: the package's ``__name__``.
        module, function: where the function is.
    """

    def home() -> Any:
        return getattr(importlib.import_module(module), function)

    class Callable(ModuleType):
        def __call__(self, *arguments: Any, **settings: Any) -> Any:
            return home()(*arguments, **settings)

        @property
        def __signature__(self) -> inspect.Signature:
            return inspect.signature(home())

    sys.modules[package].__class__ = Callable
