"""What is written is a new file or one of oomguard's own: inputs, links, devices and other files stay as they are."""

from __future__ import annotations

import importlib
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from oomguard.cli.main import COMMANDS, main
from oomguard.errors import InputError
from oomguard.estimate.coefficients import local_path, local_rows_path, shipped
from oomguard.estimate.learn import learn, write_coefficients
from oomguard.files.writing import Format, Output, check_outputs, is_same_file, marked, remove_dead_parts
from oomguard.measure import sweep
from oomguard.measure.task import Task
from oomguard.rows import read_rows, shipped_row_files

SHAPE = {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_mlp": 32, "context": 16}
NOTES = "Notes that nobody has a second copy of.\n" * 30
SCRIPT = """
import mlx.core as mx

def build():
    def step(x):
        return (x * 2).sum()
    return step, (mx.zeros((4, 4)),)

def measured():
    return lambda: mx.eval(mx.zeros((4, 4)) + 1)
"""

# What writes to the file X, by the option that names it; each takes a second where it does its work.
TRAIN = "train --config mini.json --corpus c.txt --steps 1 --batch 1 --no-learn --no-compile"
WRITES = {
    "--html": "trace own.py:build --html X",
    "--timeline": "trace own.py:build --timeline X",
    "--out of train": f"{TRAIN} --out X",
    "--out of measure": "measure --config mini.json --steps 1 --no-sequenced --no-compile --out X",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own.py").write_text(SCRIPT)
    (tmp_path / "c.txt").write_text(NOTES)
    (tmp_path / "mini.json").write_text(json.dumps(SHAPE))
    (tmp_path / "sweep.json").write_text(json.dumps({**SHAPE, "seq_len": 16, "batch": [1]}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().err


def state_of(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Each name with its kind, its inode and, of a regular file, what it holds."""
    found = {}
    for path in sorted(folder.iterdir()):
        stats = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(stats.st_mode) else b""
        found[path.name] = (stat.S_IFMT(stats.st_mode), stats.st_ino, content)
    return found


def assert_refused(line: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = state_of(folder)
    status, err = run(line, capsys)
    assert status == 2, err
    assert err.count("\n") == 1, err
    assert said in err
    assert state_of(folder) == before


def written_options() -> Iterator[str]:
    """Every option of every command that names a file to write."""
    for name in COMMANDS:
        for option in importlib.import_module(f"oomguard.cli.{name}").command.params:
            if isinstance(option.type, click.Path) and option.name in ("out", "html", "timeline"):
                yield option.opts[0] if option.name != "out" else f"--out of {name}"


def test_output_options_are_all_held_by_these_tests() -> None:
    known_inputs = {"config", "corpus", "resume", "rows_file", "coefficients_file"}
    paths = {
        (name, option.name)
        for name in COMMANDS
        for option in importlib.import_module(f"oomguard.cli.{name}").command.params
        if isinstance(option.type, click.Path) and option.name not in known_inputs
    }
    assert set(written_options()) == set(WRITES)
    assert len(paths) == len(WRITES), paths


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train --preset tiny --corpus c.txt --out c.txt", "it is the corpus; name another file"),
        (f"{TRAIN} --out ./c.txt", "it is the corpus"),
        (f"{TRAIN} --out linked.txt", "it is the corpus"),
        (f"{TRAIN} --out hard.txt", "it is the corpus"),
        (f"{TRAIN} --out mini.json", "it is what --config reads"),
        ("trace own.py:build --html own.py", "it is the script that is traced; name another file"),
        ("trace own.py:build --timeline ./own.py", "it is the script that is traced"),
        ("trace --config mini.json --html mini.json", "it is what --config reads"),
        (
            "trace --preset tiny --html X --timeline X",
            "--timeline and --html both name X; give each a file of its own",
        ),
        ("trace --preset tiny --html X --timeline ./X", "both name X"),
        ("measure own.py:measured --out own.py", "it is the script that is measured"),
        ("measure sweep.json --out sweep.json", "it is the sweep file"),
        ("measure --config mini.json --out mini.json", "it is what --config reads"),
    ],
)
def test_output_that_is_an_input_or_another_output_is_refused(
    line: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "linked.txt").symlink_to("c.txt")
    (folder / "hard.txt").hardlink_to("c.txt")
    assert_refused(line, said, folder, capsys)


FOREIGN = (
    ("a text", ""),
    ("a text without a newline", ""),
    ("nothing", ""),
    ("a link to a text", ""),
    ("a pipe", "it is a pipe, not a file"),
    ("a folder", "it is a folder, not a file"),
    ("a link to a device", "it is a device, not a file"),
)


@pytest.mark.parametrize(
    ("kind", "said", "option"),
    [
        (kind, said, option)
        for kind, said in FOREIGN
        for option in WRITES
        if (kind, option) != ("nothing", "--out of measure")  # rows are added, and nothing is lost
    ],
)
def test_output_over_what_oomguard_did_not_write_is_refused(
    kind: str, said: str, option: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = folder / "X"
    match kind:
        case "a text":
            there.write_text(NOTES)
        case "a text without a newline":
            there.write_text(NOTES.strip("\n").replace("\n", " "))
        case "nothing":
            there.touch()
        case "a link to a text":
            (folder / "notes.txt").write_text(NOTES)
            there.symlink_to("notes.txt")
        case "a pipe":
            os.mkfifo(there)
        case "a folder":
            there.mkdir()
        case "a link to a device":
            there.symlink_to(os.devnull)
    assert_refused(WRITES[option], said or "name ", folder, capsys)


@pytest.mark.parametrize("option", WRITES)
@pytest.mark.parametrize("device", ["/dev/null", "/dev/stdout"])
def test_output_to_a_device_is_refused(device: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path(device).lstat()
    status, err = run(WRITES[option].replace("X", device), capsys)
    assert status == 2
    assert err.count("\n") == 1
    after = Path(device).lstat()
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)


@pytest.mark.slow
@pytest.mark.parametrize("option", WRITES)
def test_output_of_ones_own_is_written_again_with_its_permissions(
    option: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, err = run(WRITES[option], capsys)
    assert status == 0, err
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((folder / "X").stat().st_mode) == 0o666 & ~mask
    (folder / "X").chmod(0o600)
    status, err = run(WRITES[option], capsys)
    assert status == 0, err
    assert stat.S_IMODE((folder / "X").stat().st_mode) == 0o600
    assert [path.name for path in folder.iterdir() if ".part" in path.name] == []


@pytest.mark.slow
def test_output_of_one_format_is_not_written_over_by_another(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = {}
    for option, line in WRITES.items():
        name = option.strip("-").replace(" ", "_")
        written[option] = name
        assert run(line.replace("X", name), capsys)[0] == 0
    for option, line in WRITES.items():
        for other in written.keys() - {option}:
            assert_refused(line.replace("X", written[other]), "name another file", folder, capsys)


PLAIN = Format("cannot write notes", marked("notes of ours", "notes"))


@pytest.fixture
def own(folder: Path) -> Output:
    path = folder / "notes"
    path.write_text("notes of ours: one")
    return Output(path, PLAIN, "--notes")


def test_output_is_checked_again_when_it_is_written(own: Output) -> None:
    own.check()
    own.path.unlink()
    own.path.write_text("somebody else's")
    with pytest.raises(InputError, match=r"--notes: cannot write notes .* that oomguard wrote"):
        own.write_text("notes of ours: two")
    assert own.path.read_text() == "somebody else's"


def test_output_is_whole_or_as_it_was(own: Output, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(held: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    before = state_of(folder)
    with pytest.raises(InputError, match="No space left on device"):
        own.write_text("notes of ours: two")
    assert state_of(folder) == before


def test_output_with_a_long_name_is_written(folder: Path) -> None:
    output = Output(folder / ("ä" * 120), PLAIN)
    output.check()
    output.write_text("notes of ours")
    assert output.path.read_text() == "notes of ours"
    with pytest.raises(InputError, match="File name too long"):
        Output(folder / ("a" * 300), PLAIN).check()


def test_output_that_is_write_protected_is_refused(own: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # a superuser may write to anything
    with pytest.raises(InputError, match="it is write-protected; name another file"):
        own.check()


def test_outputs_that_are_one_file_are_told_apart_from_two(folder: Path) -> None:
    (folder / "in").mkdir()
    assert is_same_file(Path("new"), folder / "in" / ".." / "new")
    assert is_same_file(Path("c.txt"), folder / "c.txt")
    assert not is_same_file(Path("new"), Path("in/new"))
    assert not is_same_file(Path("new"), Path("c.txt"))
    check_outputs([Output(folder / "one", PLAIN), Output(folder / "two", PLAIN)])


def test_parts_of_killed_writers_alone_are_removed(own: Output, folder: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    killed = [f".a.oomguard-{dead.pid}.part", f".b.{dead.pid}.part.safetensors", ".c.oomguard-1.part"]
    kept = [".d.part", f"e.oomguard-{dead.pid}.part", f".f.{os.getppid()}.part.safetensors", ".g.7.part.rar"]
    for name in (*killed, *kept):
        (folder / name).write_text("x")
    with own.replaced() as living:
        living.write_text("notes of ours: two")
        assert {path.name for path, _ in remove_dead_parts(folder)} == set(killed)
        assert living.exists()
    assert all((folder / name).exists() for name in kept)
    assert own.path.read_text() == "notes of ours: two"


def test_part_of_a_process_killed_while_writing_is_removed(own: Output, folder: Path) -> None:
    code = (
        "import os, signal; from pathlib import Path; from oomguard.files.writing import Format, Output\n"
        "output = Output(Path('killed'), Format('cannot write', lambda path: ''))\n"
        "with output.replaced() as part:\n"
        "    part.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert [size for _, size in own.check()] == [4]
    assert not [path for path in folder.iterdir() if ".part" in path.name]


def test_calibration_is_written_over_a_damaged_file_but_over_no_link(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOMGUARD_HOME", str(folder / "home"))
    path = local_path("cpu")
    path.parent.mkdir()
    path.write_text('{"schema": "oomguard.coeff')
    write_coefficients(shipped("cpu"), path)
    assert json.loads(path.read_text())["schema"] == "oomguard.coefficients/1"
    path.rename(folder / "kept.json")
    path.symlink_to(folder / "kept.json")
    with pytest.raises(InputError, match="it is a symbolic link"):
        write_coefficients(shipped("cpu"), path)


def test_rows_are_not_added_to_what_is_no_row_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOMGUARD_HOME", str(folder / "home"))
    local_rows_path().parent.mkdir()
    header, rows = read_rows(next(shipped_row_files()))
    for text in ("no line end", NOTES):
        local_rows_path().write_text(text)
        with pytest.raises(InputError, match=r"rows\.jsonl, line 1"):
            learn(header, rows[0])
        assert local_rows_path().read_text() == text
    local_rows_path().write_text('{"schema":"oomguard.rows/1","mach')  # a process that was killed
    learn(header, rows[0])
    assert read_rows(local_rows_path()) == (header, [rows[0]])


def test_rows_file_that_was_empty_before_is_there_when_no_row_was_made(folder: Path) -> None:
    (folder / "rows.jsonl").touch()
    sweep([Task(function=f"{folder / 'own.py'}:measured")], folder / "rows.jsonl").close()
    with pytest.raises(InputError):
        next(sweep([Task(case="absent!")], folder / "rows.jsonl"))
    running = sweep([], folder / "rows.jsonl")
    assert list(running) == []
    assert (folder / "rows.jsonl").exists()
