"""What is built and installed: whole, under one name, and deaf to a user's own ``model.py``."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from conftest import Environment, hatch_build

pytestmark = pytest.mark.slow

IGNORED = {"__pycache__", ".DS_Store"}


def package_files(project: Path) -> set[str]:
    """Every file under ``oomguard/``, through the links to ``model/`` and ``calibration/``."""
    found: set[str] = set()
    folders = [project / "oomguard"]
    while folders:
        for path in folders.pop().iterdir():
            if path.name in IGNORED or path.name.endswith(".pyc"):
                continue
            if path.is_dir():
                folders.append(path)
            else:
                found.add(path.relative_to(project).as_posix())
    return found


def wheel_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert len(names) == len(set(names)), "a file is in the wheel twice"
    return {name for name in names if ".dist-info/" not in name}


def test_wheel_from_sdist_holds_every_file_of_the_package(project: Path, wheel: Path) -> None:
    files = wheel_files(wheel)
    assert files == package_files(project)
    for needed in (
        "oomguard/py.typed",
        "oomguard/data/presets.json",
        "oomguard/model/__init__.py",
        "oomguard/calibration/__init__.py",
        "oomguard/calibration/rows/metal-m5pro.jsonl",
        "oomguard/cli/main.py",
    ):
        assert needed in files


def test_wheel_from_sdist_is_the_wheel_from_the_tree(project: Path, wheel: Path, tmp_path: Path) -> None:
    assert wheel_files(hatch_build(project, "wheel", tmp_path)) == wheel_files(wheel)


def test_wheel_has_one_top_level_name(wheel: Path) -> None:
    assert {name.split("/")[0] for name in wheel_files(wheel)} == {"oomguard"}


def test_sdist_holds_files_where_the_tree_holds_links(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert [m.name for m in members if m.issym() or m.islnk()] == []
    inside = {m.name.split("/", 1)[1] for m in members if "/" in m.name}
    assert {"README.md", "LICENSE", "pyproject.toml", "tests/conftest.py"} <= inside
    assert not any(name.startswith(("model/", "calibration/")) for name in inside), "held twice"


def test_wheel_names_its_requirements_and_license(project: Path, wheel: Path) -> None:
    wanted = tomllib.loads((project / "pyproject.toml").read_text())["project"]["dependencies"]
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (n for n in archive.namelist() if n.endswith("/METADATA"))
        metadata = archive.read(path).decode()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    assert len([line for line in required if "extra ==" not in line]) == len(wanted)
    assert not any("@" in line or "file:" in line for line in required), "a requirement names a place"
    assert "License-Expression: MIT" in metadata


def test_installed_wheel_runs_away_from_the_source(installed: Environment, tmp_path: Path) -> None:
    where = installed.run(["python", "-c", "import oomguard; print(oomguard.__file__)"], tmp_path)
    assert Path(where.stdout.strip()).is_relative_to(installed.folder), where.stderr
    for command in (["oomguard", "--version"], ["python", "-m", "oomguard", "--version"]):
        shown = installed.run(command, tmp_path)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert shown.stdout.startswith("oomguard ")


def test_installed_wheel_plans_behemoth_from_a_clean_folder(installed: Environment, tmp_path: Path) -> None:
    planned = installed.run(["oomguard", "plan", "--preset", "behemoth", "--json"], tmp_path)
    assert planned.returncode in (0, 1), planned.stderr
    answer = json.loads(planned.stdout)
    assert answer["schema"] == "oomguard.plan/1"
    assert (planned.returncode == 0) == bool(answer["choice"] and answer["choice"]["fits"])
    assert list(tmp_path.iterdir()) == [], "planning leaves nothing behind"


def test_installed_wheel_finds_its_shipped_rows(installed: Environment, tmp_path: Path) -> None:
    code = "from oomguard.rows import *; print(*(len(read_rows(f)[1]) for f in shipped_row_files()))"
    counted = installed.run(["python", "-c", code], tmp_path)
    assert counted.returncode == 0, counted.stderr
    assert counted.stdout.split()
    assert "0" not in counted.stdout.split()


POISON = "raise SystemExit('a user\\'s own module was imported')\n"


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    """A user's folder: its ``model.py`` and ``calibration.py`` must never be imported by oomguard."""
    for name in ("model", "calibration", "units", "plan", "measure"):
        (tmp_path / f"{name}.py").write_text(POISON)
    return tmp_path


@pytest.mark.parametrize("how", ["installed", "editable"])
@pytest.mark.parametrize(
    "command",
    [
        "oomguard --help",
        "python -m oomguard --version",
        "python -m oomguard plan --preset tiny --memory 4GB --device cpu",
        "oomguard plan --preset tiny --memory 4GB --device cpu --json",
        "oomguard train --help",
        "python -c from~oomguard.model~import~*;from~oomguard.calibration~import~*;import~oomguard.trace",
    ],
)
def test_package_never_imports_a_users_own_modules(
    how: str, command: str, poisoned: Path, request: pytest.FixtureRequest
) -> None:
    environment: Environment = request.getfixturevalue(how)
    words = [word.replace("~", " ") for word in command.split()]
    ran = environment.run(words, poisoned)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr


def test_editable_install_shows_edits_without_reinstalling(editable: Environment, project: Path) -> None:
    code = "import oomguard.model, oomguard.calibration; print(oomguard.__file__, oomguard.model.__file__)"
    where = editable.run(["python", "-c", code], project.parent)
    top, model = map(Path, where.stdout.split())
    assert top.resolve() == project / "oomguard" / "__init__.py"
    assert model.resolve() == project / "model" / "__init__.py"


def test_type_checker_sees_the_types_of_an_installed_oomguard(installed: Environment, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import oomguard.calibration\nimport oomguard.model\nfrom oomguard.units import parse_bytes\n\n"
        "reveal_type(parse_bytes('16GB'))\nparse_bytes(None)\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--follow-imports=silent"]
    checked = subprocess.run(
        [*command, "--python-executable", installed.python, "mine.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert 'Revealed type is "int"' in checked.stdout.replace("builtins.", ""), checked.stdout
    assert "mine.py:6: error: Argument 1" in checked.stdout
    assert "Found 1 error in 1 file" in checked.stdout
