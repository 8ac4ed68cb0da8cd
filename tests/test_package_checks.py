"""The project's own checks, run over all of it, and proof that they look where they should."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest


def check(project: Path, *command: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a checker of this environment in the project's folder."""
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=project, input=stdin, capture_output=True, text=True
    )


def test_ruff_finds_nothing(project: Path) -> None:
    found = check(project, "ruff", "check", "--no-cache", "--output-format=concise")
    assert found.returncode == 0, found.stdout + found.stderr


def test_ruff_would_format_nothing(project: Path) -> None:
    found = check(project, "ruff", "format", "--check", "--no-cache")
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(
    "place", ["oomguard/plan.py", "model/gpt.py", "calibration/refit.py", "tests/test_x.py"]
)
@pytest.mark.parametrize(
    "line",
    [
        "import model",
        "import model.gpt as gpt",
        "from model import gpt",
        "from model.gpt import GPT",
        "import calibration",
        "from calibration.sweeps import SWEEPS",
    ],
)
def test_ruff_refuses_a_bare_import(place: str, line: str, project: Path) -> None:
    found = check(project, "ruff", "check", "--no-cache", "--stdin-filename", place, "-", stdin=f"{line}\n")
    assert "TID251" in found.stdout, found.stdout + found.stderr


def test_ruff_allows_the_import_through_oomguard(project: Path) -> None:
    code = (
        "import oomguard.calibration\nimport oomguard.model\n\nprint(oomguard.model, oomguard.calibration)\n"
    )
    found = check(
        project, "ruff", "check", "--no-cache", "--stdin-filename", "examples/x.py", "-", stdin=code
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_ruff_checks_each_linked_file_once(project: Path) -> None:
    shown = check(project, "ruff", "check", "--no-cache", "--show-files").stdout.splitlines()
    files = [Path(line) for line in shown if line.endswith(".py")]
    assert len({file.resolve() for file in files}) == len(files)
    for folder in ("oomguard", "model", "calibration", "tests"):
        assert set((project / folder).glob("*.py")) <= set(files), f"{folder} is not checked"


@pytest.mark.slow
def test_mypy_finds_nothing_and_sees_every_file_once(project: Path, tmp_path: Path) -> None:
    found = check(project, "mypy", "--verbose", "--cache-dir", str(tmp_path))
    assert found.returncode == 0, found.stdout + found.stderr[-2000:]
    seen = re.findall(r"Parsing (?:\S*/)?(oomguard/\S+\.py) \(oomguard", found.stderr)
    linked = [f"oomguard/{path.relative_to(project)}" for path in project.glob("model/**/*.py")]
    linked += [f"oomguard/{path.relative_to(project)}" for path in project.glob("calibration/**/*.py")]
    own = [str(path.relative_to(project)) for path in (project / "oomguard").glob("**/*.py")]
    assert sorted(seen) == sorted({*own, *linked})


@pytest.mark.slow
@pytest.mark.parametrize("link", ["model", "calibration"])
def test_mypy_checks_what_the_links_point_to(link: str, project: Path, tmp_path: Path) -> None:
    """A small tree of the same form, one wrong line behind a link, checked with the project's settings."""
    (tmp_path / "pyproject.toml").write_text((project / "pyproject.toml").read_text())
    (tmp_path / "oomguard").mkdir()
    (tmp_path / "oomguard" / "__init__.py").touch()
    for name in ("model", "calibration"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / "oomguard" / name).symlink_to(f"../{name}")
    (tmp_path / link / "wrong.py").write_text("def f(x):\n    return x\n")
    found = check(tmp_path, "mypy", "--no-incremental")
    assert found.returncode == 1
    assert f"oomguard/{link}/wrong.py:1: error: Function is missing a type annotation" in found.stdout
    assert "Found 1 error in 1 file (checked 4 source files)" in found.stdout


def imported(path: Path) -> set[str]:
    """The top-level packages a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_core_requirements_are_exactly_what_the_package_imports(project: Path) -> None:
    wanted = tomllib.loads((project / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[^a-z0-9-]", requirement)[0] for requirement in wanted}
    files = [
        path for folder in ("oomguard", "model", "calibration") for path in (project / folder).rglob("*.py")
    ]
    used = set().union(*map(imported, files)) - set(sys.stdlib_module_names)
    assert used - {"oomguard", "mlx_lm"} == names
