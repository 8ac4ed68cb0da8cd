"""Step functions that the tests of ``measure`` run in children: good ones, and ones that die in every way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

MIB = 1 << 20
Run = Callable[[], object]


def _floats(mib: int) -> mx.array:
    x = mx.zeros((mib * MIB // 4,)) + 1.0
    mx.eval(x)
    return x


def four_and_eight() -> Run:
    """Holds 4 MiB, allocates another 8: the peak is 12, 4 stay."""
    kept = _floats(4)

    def run() -> mx.array:
        x = mx.concatenate([kept, kept])
        mx.eval(x)
        return x

    return run


def large_first() -> Run:
    """16 MiB beside the 1 that stays in the first step, 2 in every later one."""
    kept = _floats(1)
    calls = iter(range(1000))

    def run() -> None:
        times = 16 if next(calls) == 0 else 2
        mx.eval(mx.concatenate([kept] * times))

    return run


def counted() -> Run:
    """Writes a line to the file named by COUNT_FILE for every step."""
    kept = _floats(1)

    def run() -> None:
        with Path(os.environ["COUNT_FILE"]).open("a") as file:
            file.write("step\n")
        mx.eval(-kept)

    return run


def cyclic() -> Run:
    """Every step leaves 8 MiB in a reference cycle, which only the garbage collector takes away."""
    kept = _floats(8)

    def run() -> None:
        cycle: dict[str, Any] = {"array": -kept}
        cycle["self"] = cycle
        mx.eval(cycle["array"])

    return run


def noisy() -> Run:
    """Prints what looks like a message, on both channels."""
    sys.stdout.write('{"kind": "done"}\n')
    sys.stderr.write('{"kind": "failed", "reason": "no", "input": false}\n')
    return four_and_eight()


def lazy() -> Run:
    """Leaves it to the caller to evaluate what it returns."""
    kept = _floats(1)
    return lambda: {"loss": -kept, "step": 1}


def idle() -> Run:
    """Allocates nothing."""
    kept = _floats(1)
    return lambda: kept.shape


def fault(act: Callable[[], object], at_step: int = 1) -> Run:
    kept = _floats(1)
    calls = iter(range(1, 1000))

    def run() -> None:
        if next(calls) == at_step:
            act()
        mx.eval(-kept)

    return run


def killed() -> Run:
    return fault(lambda: os.kill(os.getpid(), signal.SIGKILL))


def segmentation_fault() -> Run:
    return fault(lambda: os.kill(os.getpid(), signal.SIGSEGV), at_step=3)


def aborted() -> Run:
    def act() -> None:
        os.write(2, b"libc++abi: out of memory\n")
        os.abort()

    return fault(act)


def aborted_while_building() -> Run:
    os.abort()


def left_without_a_word() -> Run:
    return fault(lambda: os._exit(0))


def exits() -> Run:
    return fault(lambda: sys.exit("enough"))


def raises() -> Run:
    def act() -> None:
        raise ValueError("shapes (2,3) and (4,5) do not match")

    return fault(act)


def dies_sequenced() -> Run:
    """Dies in the first step after one and three default ones."""
    return fault(lambda: os.kill(os.getpid(), signal.SIGSEGV), at_step=5)


def hangs() -> Run:
    return fault(lambda: time.sleep(60))


def hangs_without_the_interpreter() -> Run:
    """Holds the interpreter's lock, so that no thread of the child runs."""
    import ctypes

    return fault(lambda: ctypes.PyDLL(None).sleep(60))


def grows() -> Run:
    """Takes memory in pieces of 32 MiB, without end."""

    def act() -> None:
        held = []
        while True:
            held.append(_floats(32))

    return fault(act)


def grows_outside_mlx() -> Run:
    """The same, from the interpreter's memory."""

    def act() -> None:
        held = []
        while True:
            held.append(bytearray(os.urandom(1)) * (32 * MIB))

    return fault(act)


def starts_a_helper() -> Run:
    """Starts a process of its own, writes its id to HELPER_FILE, and hangs."""
    helper = subprocess.Popen(["sleep", "60"])
    Path(os.environ["HELPER_FILE"]).write_text(str(helper.pid))
    return hangs()


def writes_its_id() -> Run:
    """Writes its process id to ID_FILE and takes long."""

    def act() -> None:
        Path(os.environ["ID_FILE"]).write_text(str(os.getpid()))
        time.sleep(60)

    return fault(act)


def returns_a_number() -> int:
    return 3


not_a_function = 7
