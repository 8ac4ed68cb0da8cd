"""What a case is, and finding one by name. Nothing here imports MLX: names can be listed without it."""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from oomguard.errors import InputError

if TYPE_CHECKING:
    from oomguard.model.cases.step import CaseStep


@dataclass(frozen=True)
class Training:
    """How a network is trained: everything about the step that is not the network.

    Args:
        optimizer: a name of ``optimizers.OPTIMIZERS``.
        dtype: of parameters and floating inputs; adapters of a fine-tuned model stay float32, as in mlx-lm.
        compiled: the step is one ``mx.compile`` function.
        checkpoint: a policy for ``checkpoint_layers``, or ``mlx-lm`` for mlx-lm's own ``grad_checkpoint``.
        accumulate: micro-batches of one update.
        evaluate_micro_steps: each micro-batch is evaluated before the next is built.
        clip_norm: gradients are clipped by their global norm.
    """

    optimizer: str = "adamw"
    dtype: str = "float32"
    compiled: bool = True
    checkpoint: str = "none"
    accumulate: int = 1
    evaluate_micro_steps: bool = True
    clip_norm: bool = False

    def changes(self) -> dict[str, Any]:
        """The settings that are not the default."""
        usual = Training()
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != getattr(usual, f.name)
        }


@dataclass(frozen=True)
class Case:
    """A named small training step.

    Args:
        name: lower case, words joined by hyphens.
        about: what is in it, for a listing.
        network: ``module:function`` below ``oomguard.model.cases``; called with ``options``, it gives a
            ``Network``.
        needs: a package beyond the core that the network is built from.
    """

    name: str
    about: str
    network: str
    options: dict[str, Any] = field(default_factory=dict)
    training: Training = Training()
    needs: str = ""

    def build(self, *, evaluated: bool = True, seed: int = 0) -> CaseStep:
        """The step, ready to ``run()``; without ``evaluated``, nothing in it takes memory.

        Raises:
            InputError: a package that it needs is not installed.
        """
        from oomguard.model.cases.step import build_training

        module_name, _, function = self.network.partition(":")
        try:
            module = importlib.import_module(f"oomguard.model.cases.{module_name}")
        except ModuleNotFoundError as error:
            if not self.needs or error.name is None or error.name.partition(".")[0] != self.needs:
                raise
            extra = "pip install 'oomguard[lm]'"
            raise InputError(f"case {self.name} needs {self.needs.replace('_', '-')}: {extra}") from error
        make: Callable[..., Any] = getattr(module, function)
        network = functools.partial(make, **self.options)
        return build_training(self.name, network, self.training, evaluated=evaluated, seed=seed)


def find_case(cases: dict[str, Case], name: str) -> Case:
    """The case of that name.

    Raises:
        InputError: no such case; the text gives near names.
    """
    if name in cases:
        return cases[name]
    near = difflib.get_close_matches(name, cases, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else "oomguard measure --list-cases lists them"
    raise InputError(f"unknown case {name!r}; {hint}")
