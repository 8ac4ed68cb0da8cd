"""What happens on command lines that nobody thought of: every command, every option, values sane and absurd.

    python benchmarks/fuzz_commands.py [COUNT [SEED [FIRST]]]

A line is drawn from the click tree itself, so an option that is added is tried without a word here; line K of a seed
is always the same line. Each runs in a process of its own, in a folder of its own full of good and bad files, with 2 GB
and 20 seconds, and where the command has ``--json`` once with and once without. It must end with a documented
status, without a traceback, say a mistake in one line, and not contradict itself. What measures or trains is sent
Ctrl-C in the end, and must end then. Writes ``benchmarks/fuzz_commands.txt``.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import random
import re
import resource
import shlex
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click
import psutil

from oomguard.cli.main import COMMANDS, cli, main
from oomguard.units import format_bytes

OUTPUT = Path(__file__).with_suffix(".txt")
DATA_BYTES = 2 * 10**9
SECONDS = 20.0  # of its own computing, so that a busy machine finds nothing that is not there
WAITING_SECONDS = 120.0  # in all: what waits for ever computes nothing
INTERRUPT_AFTER = 5.0  # what works on purpose until it is stopped is stopped
STATUSES = (0, 1, 2, 130, 141)

Draw = random.Random
Pool = tuple[str, ...]

# ---- values -------------------------------------------------------------------------------------------------------


def words(text: str, *others: str) -> Pool:
    """The words of a text, and values that are no words."""
    return (*text.split(), *others)


NUMBERS = words("1 2 3 4 8 16")
ABSURD_NUMBERS = words(
    "0 -1 -0 007 1.5 1e9 2147483647 2147483648 x nan inf -inf ٣ 0x10 1_000 +4 ½ 1;2 -- true None 99999999999999999999",
    "",
    " ",
    "\u202e8",
)
ABSURD_TEXTS = words(
    "x None - -- -1 nan é中\U0001f600 %s {} ../.. $HOME * TINY ' \" \\",
    "",
    " ",
    "a" * 300,
    "a\nb",
    "tiny ",
    "\x1b[31m",
)
POLICIES = words(
    "none every stride=2 stride=sqrt stride=auto sqrt blocks=1 attention attention,blocks=1 custom_function"
    " blocks=0 blocks=999 stride=0 stride=999999999 every,blocks=2"
)
SIZES = words(
    "1GB 3MB 12MiB 900MiB 2GB 16GiB 100MB 512gb 1TB .5GiB 1B 0 32 5 1e9GB -1GB 99999999PB 1.5.2GB GB",
    "64 GB",
    "16 GiB ",
    "1 XB",
)
# By what an option's value is called in the help; a name that is not here gets only the absurd ones.
POOLS: dict[str, Pool] = {
    "N": NUMBERS,
    "X": words("0.1 0.5 0.9 1 3 20 0.0003"),
    "N|auto": words("auto AUTO", *NUMBERS),
    "POLICY": POLICIES,
    "POLICY|auto": words("auto", *POLICIES),
    "NAME": words(
        "tiny small huge behemoth adamw sgd lion adafactor muon estimate trace auto cpu metal cpu-16gb cuda-24gb"
        " m5-pro-48gb metal-36gb m1-max-32gb mlp dropout"
    ),
    "DTYPE": words("fp32 bf16 fp16 float32 int8 FP16 complex64"),
    "SIZE": SIZES,
    "SIZE|auto": words("auto", *SIZES),
    "SIZE|PERCENT": words("10% 0% 99% 100% 1GiB -5% 200GB 5 %"),
}

GOOD = {"n_layers": 2, "d_model": 32, "n_heads": 2, "d_mlp": 64, "context": 32}
OWN = """
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

def build():
    model, optimizer = nn.Linear(8, 8), optim.SGD(0.1)
    mx.eval(model.parameters())
    def step(x):
        loss, grads = nn.value_and_grad(model, lambda model, x: model(x).square().mean())(model, x)
        optimizer.update(model, grads)
        return loss
    return step, (mx.ones((4, 8)),), [model, optimizer]

def measured():
    step, arguments, state = build()
    return lambda: mx.eval(step(*arguments), *(part.state for part in state))

def raises(): raise RuntimeError("of the user's own\\nmaking")
def nothing(): return None
def leaves(): raise SystemExit(0)
number = 3
"""


def write_files(folder: Path) -> None:
    """Everything a path can name."""
    (folder / "good.json").write_text(json.dumps(GOOD))
    (folder / "bom.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    (folder / "utf16.json").write_bytes(json.dumps(GOOD).encode("utf-16"))
    (folder / "nested.json").write_text("[" * 100_000)
    (folder / "deep.json").write_text("[" * 500 + "]" * 500)
    (folder / "wide.json").write_text(json.dumps({**GOOD, "n_layers": 10_000, "d_model": 2**31 - 1}))
    (folder / "wrong.json").write_text(json.dumps({**GOOD, "n_heads": True, "d_mlp": [1], "x": None}))
    (folder / "nan.json").write_text(json.dumps({**GOOD, "dropout": float("nan")}))
    (folder / "empty").write_bytes(b"")
    (folder / "binary").write_bytes(bytes(range(256)) * 64)
    (folder / "readonly.json").write_text(json.dumps(GOOD))
    (folder / "readonly.json").chmod(0o400)
    (folder / "folder").mkdir()
    (folder / "link.json").symlink_to("good.json")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    for name in ("null", "full", "zero"):  # whatever is done to the link, the machine keeps its devices
        (folder / name).symlink_to(f"/dev/{name}")
    (folder / "two\nlines.json").write_text("{")
    (folder / "sweep.json").write_text(
        json.dumps([{"preset": "tiny", "batch": [1, 2], "n_layers": 1, "ctx": 16}])
    )
    (folder / "bad_sweep.jsonl").write_text(
        '{"preset": "tiny", "batch": 1}\n{"preset": ["tiny"], "batch": [[1]]}\n'
    )
    (folder / "own.py").write_text(OWN)
    (folder / "broken.py").write_text("def build(:\n")
    (folder / "corpus.txt").write_text("What will this step hold at its peak? " * 200)
    (folder / "short.txt").write_text("x")
    row = {"case": "mlp", "peak_bytes": 1 << 20, "mlx": "0.32.4", "backend": "cpu", "machine": "here"}
    step = {"model": GOOD, "step": {"batch": 2, "seq_len": 32}, "step_seconds": 0.1}
    printed = {"schema": "oomguard.measure/1", "rows": [row, {**row, "case": None, **step}]}
    (folder / "printed.json").write_text(json.dumps(printed))
    header = dict.fromkeys(("machine", "system", "commit", "date", "command"), "here")
    header |= {"schema": "oomguard.rows/1", "mlx": "0.32.4", "backend": "cpu"}
    lines = [header, row, {**row, "case": None, **step}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "cut.jsonl").write_text(json.dumps(header) + "\n" + json.dumps(row)[:30])
    (folder / "run.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")


PATHS = words(
    "good.json bom.json utf16.json nested.json deep.json wide.json wrong.json nan.json empty binary readonly.json"
    " folder link.json dangling loop sweep.json bad_sweep.jsonl own.py broken.py corpus.txt short.txt printed.json"
    " rows.jsonl cut.jsonl run.safetensors missing no/such/folder new.json new.html folder/new.jsonl null full"
    " zero / . ~ good.json/x own.py:build",
    "two\nlines.json",
    "good.json\n",
    "",
    "a" * 300,
)
TARGETS = words(
    "own.py:build own.py:measured own.py:raises own.py:nothing own.py:leaves own.py:number own.py: :build own.py"
    " own.py:no_such broken.py:build missing.py:build sweep.json rows.jsonl printed.json bad_sweep.jsonl"
)
# What a path usually names, so that more than the opening of a file is tried.
USUAL: dict[str, Pool] = {
    "config": ("good.json", "bom.json", "link.json"),
    "rows_file": ("rows.jsonl", "printed.json"),
    "corpus": ("corpus.txt",),
    "out": ("new.safetensors", "new.jsonl"),
    "html": ("new.html",),
    "timeline": ("new.json",),
    "resume": ("run.safetensors",),
    "target": TARGETS,
    "preset": ("tiny", "small"),
    "device": ("cpu-16gb", "m5-pro-48gb", "cpu", "metal-36gb", "m1-max-32gb"),
    "case": ("mlp", "dropout"),
    "optimizer": ("adamw", "sgd", "lion", "adafactor", "muon"),
    "engine": ("estimate", "auto", "trace"),
    "steps": ("1", "2"),
    "minutes": ("0.5",),
}

# What a command needs before it gets anywhere.
NEEDED: dict[str, tuple[tuple[str, ...], ...]] = {
    "plan": (("--preset", "tiny"), ("--preset", "huge"), ("--config", "good.json"), ("--preset", "behemoth")),
    "estimate": (("--preset", "tiny"), ("--preset", "titan"), ("--config", "bom.json")),
    "trace": (("--preset", "tiny"), ("own.py:build",), ("--case", "mlp"), ("--config", "good.json")),
    "measure": (("--preset", "tiny", "--ctx", "16"), ("own.py:measured",), ("sweep.json",), ("rows.jsonl",)),
    "train": (("--config", "good.json", "--corpus", "corpus.txt", "--steps", "2", "--no-learn"),),
}
WEIGHTS: dict[str, float] = {
    "plan": 8,
    "estimate": 6,
    "trace": 6,
    "measure": 4,
    "validate": 3,
    "train": 3,
    "calibrate": 0.3,  # half a minute, of which it gets some seconds
}

# ---- lines --------------------------------------------------------------------------------------------------------


def line(seed: int, number: int) -> list[str]:
    """The command line of that number."""
    draw = Draw(f"{seed} {number}")
    if draw.random() < 0.02:
        return [draw.choice([*ABSURD_TEXTS, "--help", "--version", "-h", "plan=1", "PLAN", "--json"])]
    name = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    ctx = click.Context(cli, info_name="oomguard")
    command = cli.get_command(ctx, name)
    assert command is not None
    typed = [name]
    if draw.random() < 0.85 and name in NEEDED:
        typed += draw.choice(NEEDED[name])
    count = min(len(command.params), int(draw.expovariate(0.4)))
    for parameter in draw.sample(command.params, count):
        typed += given(parameter, draw)
    if draw.random() < 0.04:
        odd = draw.choice(("--no-such", "-x", "--", "extra", "--json=1", "--batch"))
        typed.insert(draw.randint(1, len(typed)), odd)
    return typed


def given(parameter: click.Parameter, draw: Draw) -> list[str]:
    """An option with a value, written in one of the ways an option can be written."""
    if isinstance(parameter, click.Argument):
        return [value_of(parameter, draw)]
    assert isinstance(parameter, click.Option)
    name = draw.choice([*parameter.opts, *parameter.secondary_opts])
    if parameter.is_flag:
        return [name]
    if draw.random() < 0.01:
        return [name]
    value = value_of(parameter, draw)
    return [f"{name}={value}"] if draw.random() < 0.3 else [name, value]


def value_of(parameter: click.Parameter, draw: Draw) -> str:
    """Mostly what the option is for, at times what nobody should write."""
    name = str(parameter.name)
    usual = USUAL.get(name, ())
    if usual and draw.random() < 0.6:
        return draw.choice(usual)
    kind = parameter.type
    if isinstance(kind, click.Path) or name == "target":
        return draw.choice(PATHS + TARGETS if name == "target" else PATHS)
    if isinstance(kind, click.Choice):
        return draw.choice([*map(str, kind.choices), *ABSURD_TEXTS])
    metavar = parameter.make_metavar(click.Context(click.Command("any"))).strip("[]")
    sane = POOLS.get(metavar, ())
    if sane and draw.random() < 0.75:
        return draw.choice(sane)
    return draw.choice(ABSURD_NUMBERS if metavar in ("N", "X", "N|auto", "SIZE") else ABSURD_TEXTS)


# ---- running ------------------------------------------------------------------------------------------------------


@dataclass
class Ran:
    """How one line ended."""

    args: list[str]
    status: int | None
    out: str
    err: str
    seconds: float
    interrupted: bool

    @property
    def works(self) -> bool:
        return works(self.args)

    @property
    def command(self) -> str:
        return self.args[0] if self.args and self.args[0] in COMMANDS else ""


def works(args: list[str]) -> bool:
    """Whether a line runs steps, or simulates hundreds, for as long as it was asked to; Ctrl-C ends that."""
    name = args[0] if args else ""
    return name in ("measure", "train", "calibrate") or (
        name == "validate" and any("trace" in word for word in args)
    )


class Kitchen:
    """A warm process to fork from, and the folder whose copy every line runs in."""

    def __init__(self) -> None:
        import importlib

        for name in COMMANDS:
            importlib.import_module(f"oomguard.cli.{name}")
        for name in (
            "plan.planner",
            "trace.engine",
            "trace.policies",
            "model.step",
            "model.trainer",
            "model.cases",
        ):
            importlib.import_module(f"oomguard.{name}")
        for name in (
            "plan_text",
            "trace_text",
            "trace_html",
            "trace_json",
            "as_json",
            "train_text",
            "validate_text",
        ):
            importlib.import_module(f"oomguard.report.{name}")
        _hold_the_machine_still()
        self._home = tempfile.TemporaryDirectory(prefix="fuzz-")
        self.files = Path(self._home.name) / "files"
        self.files.mkdir()
        write_files(self.files)
        self._count = 0

    def close(self) -> None:
        self._home.cleanup()

    def run(self, args: list[str]) -> Ran:
        """Runs a line in a process of its own and its own copy of the files."""
        self._count += 1
        place = Path(self._home.name) / str(self._count)
        shutil.copytree(self.files, place / "here", symlinks=True)
        (place / "home").mkdir()
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            _be(args, place)
        status, interrupted = _wait(child, works(args))
        out, err = ((place / name).read_text(errors="replace") for name in ("out", "err"))
        shutil.rmtree(place)
        return Ran(args, status, out, err, time.monotonic() - start, interrupted)


def _hold_the_machine_still() -> None:
    """The memory that is free changes from one moment to the next, and a plan with it."""
    from oomguard.machine import system as machine

    now = machine.memory()
    machine.memory = lambda: now


def _be(args: list[str], place: Path) -> NoReturn:
    """The child: the command line ``oomguard ARGS``, and nothing of its parent."""
    status = 99
    try:
        os.setsid()
        os.chdir(place / "here")
        os.environ.update(HOME=str(place / "home"), OOMGUARD_HOME=str(place / "home" / "data"), COLUMNS="80")
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.argv = ["fuzz", *args]
        main(args)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 98
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _wait(child: int, interruptible: bool) -> tuple[int | None, bool]:
    """The child's status, None where it had to be killed, and whether it was sent Ctrl-C before."""
    start, interrupted = time.monotonic(), False
    usage = psutil.Process(child)
    while True:
        done, status, _ = os.wait4(child, os.WNOHANG)
        if done:
            with suppress(OSError):
                os.killpg(child, signal.SIGKILL)
            return os.waitstatus_to_exitcode(status), interrupted
        elapsed = time.monotonic() - start
        if interruptible and elapsed > INTERRUPT_AFTER and not interrupted:
            os.kill(child, signal.SIGINT)
            interrupted = True
        if elapsed > SECONDS and (elapsed > WAITING_SECONDS or sum(usage.cpu_times()[:4]) > SECONDS):
            with suppress(OSError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None, interrupted
        time.sleep(0.005)


# ---- what must hold -----------------------------------------------------------------------------------------------


def problems(ran: Ran) -> Iterator[str]:
    """What is wrong with how one line ended."""
    if ran.status is None:
        yield f"did not end within {SECONDS:g} s" + (", not even by Ctrl-C" if ran.interrupted else "")
        return
    if "Traceback (most recent call last)" in ran.out + ran.err:
        yield "a traceback: " + ran.err.strip().splitlines()[-2 if ran.status == 70 else -1][:150]
    if ran.status not in STATUSES:
        yield f"status {ran.status}"
    if ran.status == 130 and not ran.interrupted:
        yield "stopped, and nobody did"
    if re.search(r"Input should|Field required|Extra inputs|validation error", ran.err + ran.out):
        yield "a sentence of pydantic's"
    if ran.status == 2 and ran.args and ran.args != ["--"]:
        yield from _mistake_problems(ran)
    if ran.status in (0, 1) and _asks_json(ran) and "--help" not in ran.args and "-h" not in ran.args:
        yield from _json_problems(ran)


def _mistake_problems(ran: Ran) -> Iterator[str]:
    said = [text for text in ran.err.splitlines() if not text.startswith(("note: ", "warning: "))]
    if not ran.works and ran.out:
        yield "an answer on stdout beside status 2"
    if not said or not said[-1].startswith("oomguard"):
        yield "status 2 without a line that says why"
    if len(said) > 1 and not ran.works:
        yield f"a mistake in {len(said)} lines: {said[0][:80]}"
    if said and len(said[-1]) > 700:
        yield f"a line of {len(said[-1])} characters"


def _asks_json(ran: Ran) -> bool:
    return "--json" in ran.args


def _json_problems(ran: Ran) -> Iterator[str]:
    try:
        value = json.loads(ran.out, parse_constant=_no_constant)
    except ValueError as error:
        yield f"--json is not JSON: {error}"
        return
    if not isinstance(value, dict):
        yield f"--json is a {type(value).__name__}"
    elif ran.command in CHECKS and value.get("schema", "").startswith(f"oomguard.{ran.command}/"):
        yield from CHECKS[ran.command](value, ran)


def _no_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _plan_problems(value: dict[str, Any], ran: Ran) -> Iterator[str]:
    choice = value["choice"]
    if (choice is not None) != (ran.status == 0):
        yield f"status {ran.status} beside a choice of {choice and choice['batch']}"
    for each in [*value["candidates"], *([choice] if choice else [])]:
        if sum(each["breakdown"].values()) != each["peak_bytes"]:
            yield f"a breakdown that sums to {sum(each['breakdown'].values())} of {each['peak_bytes']}"
        if min(each["breakdown"].values(), default=0) < 0:
            yield f"an item of {min(each['breakdown'].values())} bytes"
        if each["fits"] != (each["high_bytes"] <= value["device"]["budget_bytes"]) and each["fits"]:
            yield f"fits with {each['high_bytes']} of {value['device']['budget_bytes']}"
        if not each["low_bytes"] <= each["peak_bytes"] <= each["high_bytes"]:
            yield "a peak outside its band"
    if choice is not None and not choice["fits"]:
        yield "a choice that does not fit"


def _estimate_problems(value: dict[str, Any], ran: Ran) -> Iterator[str]:
    if sum(value["breakdown"].values()) != value["peak_bytes"]:
        yield f"a breakdown that sums to {sum(value['breakdown'].values())} of {value['peak_bytes']}"
    if max(value["phases"].values()) != value["peak_bytes"]:
        yield "a peak that no phase has"


def _trace_problems(value: dict[str, Any], ran: Ran) -> Iterator[str]:
    if (value["fits"] is False) != (ran.status == 1):
        yield f"status {ran.status} beside fits {value['fits']}"
    if sum(value["breakdown"].values()) != value["peak_bytes"]:
        yield f"a breakdown that sums to {sum(value['breakdown'].values())} of {value['peak_bytes']}"


CHECKS: dict[str, Callable[[dict[str, Any], Ran], Iterator[str]]] = {
    "plan": _plan_problems,
    "estimate": _estimate_problems,
    "trace": _trace_problems,
}


def contradictions(text: Ran, as_json: Ran) -> Iterator[str]:
    """What one form of a line says and the other denies."""
    same = not text.works or 2 in (text.status, as_json.status)
    if same and text.status != as_json.status:
        yield f"status {text.status} as text and {as_json.status} as JSON"
        return
    if text.status == 2 and not text.works and text.err != as_json.err:
        yield f"one mistake in two ways: {text.err.strip()} / {as_json.err.strip()}"
    if text.status not in (0, 1) or "--help" in text.args or "-h" in text.args:
        return
    with suppress(ValueError):
        value = json.loads(as_json.out)
        if text.command == "plan":
            yield from _plan_contradictions(text.out, value)
        elif text.command in ("estimate", "trace") and format_bytes(value["peak_bytes"]) not in text.out:
            yield f"the peak {format_bytes(value['peak_bytes'])} is not in the text"


def _plan_contradictions(text: str, value: dict[str, Any]) -> Iterator[str]:
    choice = value["choice"]
    said = re.search(r"^(Fits|Does not fit)\b.*", text, re.MULTILINE)
    if said is None:
        yield "a plan that says neither"
    elif (said[1] == "Fits") != (choice is not None):
        yield f"{said[0]!r} beside a choice of {choice and choice['batch']}"
    elif choice is not None:
        if not re.search(rf"\bbatch {choice['batch']}\b", said[0].replace(",", "")):
            yield f"{said[0]!r} beside batch {choice['batch']}"
        if format_bytes(choice["peak_bytes"]) not in text:
            yield f"the peak {format_bytes(choice['peak_bytes'])} is not in the text"


@dataclass
class Found:
    """A line and what is wrong with it."""

    number: int
    args: list[str]
    texts: list[str]
    runs: list[Ran]


def both_forms(args: list[str]) -> tuple[list[str], list[str]] | None:
    """The line without and with ``--json``; None where the command has no such option."""
    ctx = click.Context(cli)
    command = cli.get_command(ctx, args[0]) if args and args[0] in COMMANDS else None
    if command is None or not any("--json" in parameter.opts for parameter in command.params) or "--" in args:
        return None
    text = [word for word in args if word != "--json"]
    return text, [text[0], "--json", *text[1:]]


def check_line(kitchen: Kitchen, seed: int, number: int) -> Found:
    """Runs one line, in both forms where it has two, and says what is wrong."""
    args = line(seed, number)
    forms = both_forms(args)
    runs = [kitchen.run(args)] if forms is None else [kitchen.run(form) for form in forms]
    texts = [text for ran in runs for text in problems(ran)]
    if forms is not None and not texts:
        texts += contradictions(*runs)
    return Found(number, args, list(dict.fromkeys(texts)), runs)


_kitchens: list[Kitchen] = []


def _check_in_worker(seed_and_number: tuple[int, int]) -> Found:
    if not _kitchens:
        _kitchens.append(Kitchen())
        atexit.register(_kitchens[0].close)
    return check_line(_kitchens[0], *seed_and_number)


def fuzz(count: int, seed: int, first: int = 0, jobs: int = 2) -> Iterator[Found]:
    """Runs ``count`` lines, ``jobs`` at a time, and yields what became of each, in order."""
    numbers = [(seed, number) for number in range(first, first + count)]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_check_in_worker, numbers, chunksize=1)


def summary(found: list[Found], seed: int) -> Iterator[str]:
    """How often each command ended in which way, and how many lines something is wrong with."""
    runs = [ran for each in found for ran in each.runs]
    for name in ("", *COMMANDS):
        ended = Counter(str(ran.status) for ran in runs if ran.command == name)
        yield f"{name or 'none':10}" + "".join(
            f"  {n:5} x status {status}" for status, n in sorted(ended.items())
        )
    slowest = max((ran.seconds for ran in runs if not ran.works), default=0.0)
    wrong = sum(bool(each.texts) for each in found)
    yield f"{len(found)} lines of seed {seed}, {len(runs)} runs, slowest answer {slowest:.1f} s: {wrong} with a problem"


def run_all(arguments: list[str]) -> int:
    count, seed, first = (*map(int, arguments), *(2000, 7, 0)[len(arguments) :])
    done = []
    with OUTPUT.open("w") as output:

        def tell(text: str) -> None:
            print(text, flush=True)
            print(text, file=output, flush=True)

        tell(f"python benchmarks/fuzz_commands.py {count} {seed} {first}\n")
        for found in fuzz(count, seed, first):
            done.append(found)
            if found.texts:
                tell("\n    ".join([f"{found.number}: oomguard {shlex.join(found.args)}", *found.texts]))
        tell("\n" + "\n".join(summary(done, seed)))
    return 1 if any(found.texts for found in done) else 0


if __name__ == "__main__":
    sys.exit(run_all(sys.argv[1:]))
