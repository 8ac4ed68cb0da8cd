"""Runs what a Markdown file shows: its console sessions, its shell scripts and its Python.

A fenced ``console`` block is a session: a line ``$ command`` (with ``> `` lines that continue it) and under
it what the command prints, the two streams together. The whole output is shown, except that ``...`` alone on
a line stands for any lines and ``...`` within one for any text. A command with nothing under it may print
anything. A fenced ``bash`` block is a script, a fenced ``python`` block a program; both must exit with 0.

A comment on the line above a block says what is special about it, several things with ``;`` between:

    <!-- run: exit 1 -->                  its last command exits with that status; the others with 0
    <!-- run: figures vary -->            every number, and a unit of bytes or time, stands for any other
    <!-- run: not here, REASON -->        it is not run
"""

from __future__ import annotations

import difflib
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```(?P<language>\w*)\s*$")
_DIRECTIVE = re.compile(r"^<!-- run: (?P<what>.+) -->$")
_EXIT = re.compile(r"exit (?P<status>\d+)")
_LANGUAGES = ("console", "bash", "python")

_NUMBER = r"\d[\d,]*(?:\.\d+)?"
_UNIT = r"\b(?:B|[KMGT]iB|ms|s|min|h)\b"
_RULE = r"[─━═]{2,}|-{3,}"
_VARYING = re.compile(rf"(?P<number>{_NUMBER})|(?P<unit>{_UNIT})|(?P<rule>{_RULE})|(?P<space>[ \t]+)")
_ANY = {"number": _NUMBER, "unit": _UNIT, "rule": r"[─━═-]+", "space": r"[ \t]+"}


@dataclass(frozen=True)
class Command:
    """One command of a session, and the lines shown under it."""

    text: str
    shown: str = ""


@dataclass(frozen=True)
class Block:
    """One fenced block; ``line`` is that of its opening fence."""

    line: int
    language: str
    body: str
    status: int = 0
    figures_vary: bool = False
    not_here: str = ""

    @property
    def name(self) -> str:
        """A name for a test report: the line and how the block begins."""
        first = self.body.removeprefix("$ ").split("\n")[0]
        return f"line {self.line}: {first[:40]}"

    def commands(self) -> list[Command]:
        """The commands of a session; a script or a program is one command."""
        if self.language != "console":
            return [Command(self.body)]
        found: list[Command] = []
        for line in self.body.splitlines():
            if line.startswith("$ "):
                found.append(Command(line[2:]))
            elif not found:
                raise ValueError(f"line {self.line}: a session begins with a command, not with {line!r}")
            elif line.startswith("> ") and not found[-1].shown:
                found[-1] = Command(f"{found[-1].text}\n{line[2:]}")
            else:
                found[-1] = Command(found[-1].text, f"{found[-1].shown}{line}\n")
        return found


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a Markdown text that can be run, in order.

    Raises:
        ValueError: a directive that is none of the above, or a fence that is never closed.
    """
    lines = text.splitlines()
    position = 0
    while position < len(lines):
        opened = _FENCE.match(lines[position])
        if opened is None:
            position += 1
            continue
        if "```" not in lines[position + 1 :]:
            raise ValueError(f"line {position + 1}: this block is never closed")
        end = lines.index("```", position + 1)
        if opened["language"] in _LANGUAGES:
            above = _DIRECTIVE.match(lines[position - 1]) if position else None
            block = Block(position + 1, opened["language"], "\n".join(lines[position + 1 : end]))
            yield _directed(block, above["what"]) if above else block
        position = end + 1


def _directed(block: Block, what: str) -> Block:
    values = {"line": block.line, "language": block.language, "body": block.body}
    for directive in (part.strip() for part in what.split(";")):
        if status := _EXIT.fullmatch(directive):
            values["status"] = int(status["status"])
        elif directive == "figures vary":
            values["figures_vary"] = True
        elif directive.startswith("not here, "):
            values["not_here"] = directive.removeprefix("not here, ")
        else:
            raise ValueError(f"line {block.line - 1}: {directive!r} is not something to run a block by")
    return Block(**values)  # type: ignore[arg-type]


def run_block(block: Block, variables: Mapping[str, str], folder: Path, timeout: float = 900) -> None:
    """Runs a block in a folder and compares.

    Raises:
        AssertionError: a wrong exit status, or an output that is not what the block shows.
    """
    commands = block.commands()
    for command in commands:
        ran = subprocess.run(
            ["python", "-c", command.text]
            if block.language == "python"
            else ["bash", "-euo", "pipefail", "-c", command.text],
            cwd=folder,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        status = block.status if command is commands[-1] else 0
        assert ran.returncode == status, (
            f"line {block.line}: exit status {ran.returncode}, not {status}, of\n{command.text}\n{ran.stdout}"
        )
        difference = compare(command.shown, ran.stdout, block.figures_vary)
        assert not difference, f"line {block.line}: {command.text}\n{difference}"


def compare(shown: str, printed: str, figures_vary: bool = False) -> str:
    """Nothing when what was printed is what is shown, or else the two side by side as a difference."""
    if not shown.strip() or re.fullmatch(
        _pattern(shown.strip("\n"), figures_vary), printed.strip("\n") + "\n"
    ):
        return ""
    lines = difflib.unified_diff(
        shown.strip("\n").splitlines(), printed.strip("\n").splitlines(), "shown", "printed", lineterm=""
    )
    return "\n".join(lines)


def _pattern(shown: str, figures_vary: bool) -> str:
    return "".join(
        r"(?:.*\n)*?" if line.strip() == "..." else _line_pattern(line.rstrip(), figures_vary) + r"[ \t]*\n"
        for line in shown.split("\n")
    )


def _line_pattern(line: str, figures_vary: bool) -> str:
    parts = line.split("...")
    return ".*?".join(_varying(part) if figures_vary else re.escape(part) for part in parts)


def _varying(text: str) -> str:
    pieces: list[str] = []
    position = 0
    for match in _VARYING.finditer(text):
        assert match.lastgroup is not None
        pieces += [re.escape(text[position : match.start()]), _ANY[match.lastgroup]]
        position = match.end()
    return "".join([*pieces, re.escape(text[position:])])
