"""The named shapes that ship with oomguard (``data/presets.json``)."""

from __future__ import annotations

import difflib
import functools
import json
from importlib import resources

from oomguard.config.model import ModelConfig
from oomguard.errors import InputError


@functools.cache
def presets() -> dict[str, ModelConfig]:
    """Every shipped shape by name, smallest first."""
    raw = json.loads(resources.files("oomguard").joinpath("data/presets.json").read_text())
    return {name: ModelConfig(name=name, **shape) for name, shape in raw.items() if not name.startswith("_")}


def preset(name: str) -> ModelConfig:
    """The shape of that name.

    Raises:
        InputError: no such preset; the text gives the near names, or all of them.
    """
    known = presets()
    if str(name) in known:
        return known[str(name)]
    near = difflib.get_close_matches(str(name).lower(), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
    raise InputError(f"unknown preset {name!r}; {hint}")
