"""The README's commands run and print what it shows; and what runs them would notice if they did not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from conftest import PROJECT, Environment
from console_blocks import Block, Command, blocks, compare, run_block

README = PROJECT / "README.md"
TEST_COMMANDS = ("pip install '.[test]'", "pytest")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has after cloning, and works in from one command to the next."""
    folder = tmp_path_factory.mktemp("clone") / "oomguard"
    hidden = shutil.ignore_patterns(".*", "__pycache__", "build", "dist")
    shutil.copytree(PROJECT, folder, symlinks=True, ignore=hidden)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("block", list(blocks(README.read_text())), ids=lambda block: block.name)
def test_readme_block_runs_and_prints_what_it_shows(
    block: Block, installed: Environment, clone: Path
) -> None:
    if block.not_here:
        pytest.skip(f"not run: {block.not_here}")
    run_block(block, installed.variables(), clone)


def test_readme_skips_only_what_fetches_or_is_this_suite() -> None:
    for block in blocks(README.read_text()):
        if block.not_here:
            words = {command.text.split()[0] for command in block.commands()}
            assert words <= {"git", "cd", "pip", "pytest", "python3", "source", "sudo", ".ci/run", "eval"}, (
                block
            )


def test_ci_runs_the_readmes_test_command() -> None:
    readme = README.read_text()
    script = (PROJECT / ".ci" / "run").read_text()
    for command in TEST_COMMANDS:
        assert command in readme, f"the README does not say how to test: {command}"
        assert command.removeprefix("pip install ") in script
    assert os.access(PROJECT / ".ci" / "run", os.X_OK)
    assert ".ci/system-packages.sh" in readme
    assert ".ci/system-packages.sh" in script


MADE_UP = """\
# A made-up readme

```console
$ echo one; echo two
one
two
$ printf '%s\\n' \\
>   'peak 3.2 GiB'
peak 3.2 GiB
```

Not run: no language, or one that is not ours.

```
$ false
```
```json
{"a": 1}
```

<!-- run: exit 3 -->
```console
$ true
$ exit 3
```

<!-- run: figures vary; exit 0 -->
```bash
test -d .
```

<!-- run: not here, it needs a network -->
```bash
curl nowhere
```

```python
import sys
sys.exit(0)
```
"""


def test_blocks_are_found_with_what_is_said_of_them() -> None:
    session, failing, script, skipped, program = blocks(MADE_UP)
    assert (session.line, session.language, session.status) == (3, "console", 0)
    assert session.commands() == [
        Command("echo one; echo two", "one\ntwo\n"),
        Command("printf '%s\\n' \\\n  'peak 3.2 GiB'", "peak 3.2 GiB\n"),
    ]
    assert (failing.status, failing.figures_vary) == (3, False)
    assert (script.language, script.figures_vary, script.body) == ("bash", True, "test -d .")
    assert skipped.not_here == "it needs a network"
    assert program.language == "python"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- run: sometimes -->\n```console\n$ true\n```\n", "'sometimes'"),
        ("```console\n$ true\n", "never closed"),
    ],
)
def test_blocks_refuse_what_they_do_not_know(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        list(blocks(text))


def test_session_refuses_output_before_a_command() -> None:
    (block,) = blocks("```console\nhello\n```\n")
    with pytest.raises(ValueError, match="begins with a command"):
        block.commands()


def run_made_up(text: str, folder: Path) -> None:
    for block in blocks(text):
        if not block.not_here:
            run_block(block, os.environ, folder)


def test_run_passes_a_true_readme(tmp_path: Path) -> None:
    run_made_up(MADE_UP, tmp_path)


def test_run_keeps_files_from_one_command_to_the_next(tmp_path: Path) -> None:
    run_made_up("```console\n$ echo 7 > kept\n$ cat kept\n7\n```\n```bash\ntest -f kept\n```\n", tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```console\n$ echo 4.1 GiB\n4.2 GiB\n```\n", r"\+4.1 GiB"),
        ("```console\n$ echo one; echo two\none\n```\n", r"\+two"),
        ("```console\n$ false\n```\n", "exit status 1, not 0"),
        ("```console\n$ false | cat\n```\n", "exit status 1, not 0"),
        ("<!-- run: exit 1 -->\n```console\n$ true\n```\n", "exit status 0, not 1"),
        ("<!-- run: exit 1 -->\n```console\n$ false\n$ false\n```\n", "exit status 1, not 0"),
        ("```bash\nfalse\ntrue\n```\n", "exit status 1, not 0"),
        ("```python\nraise SystemExit(2)\n```\n", "exit status 2, not 0"),
        ("<!-- run: figures vary -->\n```console\n$ echo no peak\npeak 3 GiB\n```\n", r"\+no peak"),
    ],
)
def test_run_fails_a_false_readme(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=said):
        run_made_up(text, tmp_path)


@pytest.mark.parametrize(
    ("shown", "printed", "figures_vary", "same"),
    [
        ("a", "a\n", False, True),
        ("a  ", "a", False, True),
        ("a", "a\nb", False, False),
        ("a\n...", "a\nb\nc", False, True),
        ("...\nc", "a\nb\nc", False, True),
        ("...\nc", "a\nb\nd", False, False),
        ("a\n...\nc", "a\nc", False, True),
        ("batch ... fits", "batch 8 with every block recomputed fits", False, True),
        ("batch ... fits", "batch 8\nfits", False, False),
        ("3.2 GiB", "3.4 GiB", False, False),
        ("3.2 GiB", "3.4 GiB", True, True),
        ("3.2 GiB", "340.0 MiB", True, True),
        ("12 s", "1,340 ms", True, True),
        ("3.2 GiB", "many GiB", True, False),
        ("| 3.2 | a |\n----", "|  13.25 |   a |\n--------", True, True),
        ("batch 4", "stride 4", True, False),
        ("a.b", "axb", False, False),
        ("", "anything", False, True),
    ],
)
def test_compare_says_what_differs(shown: str, printed: str, figures_vary: bool, same: bool) -> None:
    assert (compare(shown, printed, figures_vary) == "") is same
