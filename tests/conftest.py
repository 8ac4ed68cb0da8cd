"""What all tests share: the project's folder, a home of their own, and oomguard installed from a wheel."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

# Examples are the same on every run, and a busy machine is no failure.
settings.register_profile("oomguard", derandomize=True, deadline=None)
settings.load_profile("oomguard")

PROJECT = Path(__file__).resolve().parent.parent


def pytest_sessionstart() -> None:
    """Refuses to test an oomguard that was installed before the tree changed; signals act as from a terminal.

    A shell's background job ignores SIGINT, ``nohup`` ignores SIGHUP, and every child inherits it: tests that
    stop a child would wait forever for one that respects what it was told.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    spec = importlib.util.find_spec("oomguard")
    if spec is None or spec.origin is None:
        pytest.exit("oomguard is not installed here; run: pip install '.[test]'", returncode=4)
    package = Path(spec.origin).parent
    folders = {"oomguard": package, "model": package / "model", "calibration": package / "calibration"}
    for folder, there in folders.items():
        for path in (PROJECT / folder).rglob("*.py"):
            twin = there / path.relative_to(PROJECT / folder)
            if not twin.exists() or twin.read_bytes() != path.read_bytes():
                what = f"{path.relative_to(PROJECT)} is not what is installed in {package}"
                pytest.exit(f"{what}; run again: pip install '.[test]'", returncode=4)


@pytest.fixture(scope="session")
def project() -> Path:
    """The folder that holds pyproject.toml."""
    return PROJECT


@pytest.fixture(autouse=True, scope="session")
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home of the tests' own, so that no test reads or adds to the calibration of whoever runs them."""
    home = tmp_path_factory.mktemp("home")
    os.environ["HOME"] = str(home)
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        os.environ.pop(name, None)
    for name in [name for name in os.environ if name.startswith("OOMGUARD_")]:
        del os.environ[name]
    os.environ["COLUMNS"] = "80"
    return home


@dataclass(frozen=True)
class Environment:
    """A virtual environment with oomguard in it, and beside it the packages of the one running the tests."""

    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def variables(self) -> dict[str, str]:
        """The variables of a shell in which it is activated."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") and k != "VIRTUAL_ENV"}
        return {**kept, "PATH": os.pathsep.join([str(self.folder / "bin"), kept.get("PATH", os.defpath)])}

    def run(
        self, command: Sequence[str], cwd: Path, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Runs ``oomguard ...`` or ``python ...`` of this environment, as if it were activated."""
        return subprocess.run(
            [str(self.folder / "bin" / command[0]), *command[1:]],
            cwd=cwd,
            env=self.variables(),
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def pip_install(self, *arguments: str) -> None:
        """Installs without network and without dependencies: they come from the environment beside."""
        # Ignoring what is installed: pip would find the oomguard of the environment beside and stop there.
        options = ["--quiet", "--no-deps", "--no-index", "--ignore-installed"]
        run_checked([self.python, "-m", "pip", "install", *options, *arguments])


def run_checked(command: Sequence[str], cwd: Path | None = None) -> None:
    """Runs a command that must succeed; a failure shows what it said."""
    ran = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert ran.returncode == 0, f"{' '.join(command)}\n{ran.stdout}{ran.stderr}"


def make_environment(folder: Path) -> Environment:
    """A new virtual environment that sees the packages of this one, but not the oomguard installed here.

    A path in a ``.pth`` file comes after the environment's own packages, and the ``.pth`` files it holds
    (that of an editable oomguard) are not read.
    """
    venv.create(folder, with_pip=True, symlinks=True)
    environment = Environment(folder)
    beside = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    own = next(folder.glob("lib/python*/site-packages"))
    (own / "beside.pth").write_text("".join(f"{path}\n" for path in beside))
    return environment


def hatch_build(source: Path, target: str, folder: Path) -> Path:
    """Builds ``sdist`` or ``wheel`` of a source tree into a folder, without network."""
    run_checked([sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)], cwd=source)
    (built,) = folder.glob("*.tar.gz" if target == "sdist" else "*.whl")
    return built


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, built from the working tree."""
    return hatch_build(PROJECT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the unpacked source distribution: what an index would serve."""
    import tarfile

    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return hatch_build(source, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with that wheel installed."""
    environment = make_environment(tmp_path_factory.mktemp("installed"))
    environment.pip_install(str(wheel))
    return environment


@pytest.fixture(scope="session")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the working tree installed editable, as for developing it."""
    environment = make_environment(tmp_path_factory.mktemp("editable"))
    environment.pip_install("--no-build-isolation", "--editable", str(PROJECT))
    return environment
