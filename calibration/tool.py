"""What the tools of this package share: a path to write to, always said, and errors in one line.

Installed, the package lies where nothing should be written; in a checkout a path inside it is as easily typed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from oomguard.errors import InputError, OomguardError


def output_path(arguments: Sequence[str], usage: str) -> Path:
    """The one argument of a tool that writes.

    Args:
        arguments: of the command line.
        usage: the whole command: an error ends with it.

    Raises:
        InputError: none or several, or it lies in a folder that does not exist.
    """
    if len(arguments) != 1 or not arguments[0] or arguments[0].startswith("-"):
        raise InputError(f"where to write is one argument; {usage}")
    path = Path(arguments[0])
    if not path.absolute().parent.is_dir():
        raise InputError(f"no folder {path.parent} to write {path.name} to; {usage}")
    return path


def run_tool(main: Callable[[list[str]], None]) -> None:
    """Calls ``main`` with the arguments of the command line; what the user can mend is one line and status 2."""
    try:
        main(sys.argv[1:])
    except (OomguardError, OSError) as error:
        print(f"oomguard: {error}", file=sys.stderr)
        sys.exit(2)
