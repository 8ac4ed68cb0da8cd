"""``oomguard trace`` given something it cannot trace: status 2 and one line that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_trace_cli import OWN, own_target, run

TARGET = "FILE"
STEPS = {
    "reads an item": (
        "def step(x): return update(x).item()\ndef build(): return step, (x,), [model, optimizer]",
        ["reads a value while it is built", ".item()", "after the step has returned"],
    ),
    "evaluates": (
        "def step(x):\n    loss = update(x)\n    mx.eval(loss)\n    return loss\n"
        "def build(): return step, (x,), [model, optimizer]",
        ["reads a value while it is built", "mx.eval(loss)"],
    ),
    "depends on a value": (
        "def step(x):\n    loss = update(x)\n    return loss * 2 if loss > 0 else loss\n"
        "def build(): return step, (x,), [model, optimizer]",
        ["if loss > 0", "mx.where"],
    ),
    "takes no arrays": (
        "def build(): return (lambda: 3), ()",
        ["takes no arrays", "state=[model, optimizer]"],
    ),
    "returns no arrays": (
        "def step(x): return 'done'\ndef build(): return step, (x,), []",
        ["returns no arrays", "return the loss"],
    ),
    "raises": (
        "def step(x): raise ValueError('two\\nlines')\ndef build(): return step, (x,)",
        ["the step raised ValueError", "two lines"],
    ),
    "gets another shape": (
        "def build(): return update, (x[:, :3],)",
        ["the step raised ValueError", "(128,3)"],
    ),
    "lacks an argument": ("def build(): return update, ()", ["the step raised TypeError", "'x'"]),
}
FUNCTIONS = {
    "returns nothing": ("def build(): pass", ["build returned nothing", "(step, arguments)"]),
    "returns too much": (
        "def build(): return 1, 2, 3, 4, 5",
        ["returned 5 values", "(step, arguments, state)"],
    ),
    "returns no step": ("def build(): return 1, (x,)", ["returned int where the step should be"]),
    "forgets the tuple": (
        "def build(): return update, x",
        ["arguments are mlx.core.array", "(step, (batch,))"],
    ),
    "gives a lone state": ("def build(): return update, (x,), model", ["the state is", "[model, optimizer]"]),
    "is a value": ("build = 7", ["build is int, not a function"]),
    "is the step": ("build = update", ["takes arguments (x)", "name the function that builds the step"]),
    "raises": ("def build(): raise RuntimeError('no\\ndata')", ["raised RuntimeError at line", "no data"]),
    "exits": ("def build(): raise SystemExit(3)", ["raised SystemExit"]),
    "has another name": (
        "def builds(): return update, (x,)",
        ["has no function 'build'", "did you mean builds"],
    ),
}
FILES = {
    "no Python": ("def build(:", ["line 1: invalid syntax"]),
    "a missing module": ("import no_such_module_here", ["raised ModuleNotFoundError at line 1"]),
    "an exit": ("raise SystemExit('not here')", ["raised SystemExit", "not here"]),
}
USAGES = {
    "nothing": ([], ["nothing to trace", "FILE.py:FUNCTION, --preset, --config or --case"]),
    "two models": (["--preset", "tiny", "--config", "x.json"], ["--preset and --config", "give one"]),
    "model and case": (["--preset", "tiny", "--case", "mlp"], ["--case mlp and --preset", "give one"]),
    "no function": (["train.py"], ["'train.py' names no step", "FILE.py:FUNCTION"]),
    "no file": (["no_such_file.py:build"], ["no file no_such_file.py"]),
    "no Python file": (["train.txt:build"], ["train.txt is not a Python file"]),
    "unknown case": (["--case", "mlpp"], ["unknown case 'mlpp'", "did you mean mlp"]),
    "unknown preset": (["--preset", "hug"], ["--preset", "huge"]),
    "batch of a case": (["--case", "mlp", "--batch", "3"], ["--case mlp is a step already", "--batch"]),
    "dtype of a file": (["a.py:build", "--dtype", "bf16"], ["a.py:build is a step already", "--dtype"]),
    "two limits": (["--preset", "tiny", "--sequenced", "--memory-limit", "1GB"], ["give one of them"]),
    "no size": (["--preset", "tiny", "--memory-limit", "much"], ["--memory-limit: 'much' is not a size"]),
    "no budget": (["--preset", "tiny", "--budget", "0"], ["--budget", "0 bytes"]),
    "no policy": (
        ["--preset", "tiny", "--compare", "some"],
        ["--compare: 'some' is not a checkpoint policy"],
    ),
    "too long": (["--preset", "tiny", "--ctx", "9999"], ["9999 is longer than tiny's context 128"]),
    "no folder": (["--preset", "tiny", "--html", "no/such/x.html"], ["no folder no/such to write x.html to"]),
}


def assert_one_line(capsys: pytest.CaptureFixture[str], args: list[str], said: list[str]) -> None:
    status, out, err = run(capsys, "trace", *args)
    assert (status, out) == (2, "")
    assert err.startswith("oomguard")
    assert err.count("\n") == 1, err
    for part in said:
        assert part in err


@pytest.fixture
def own(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return tmp_path / f"own_{abs(hash(request.node.name))}.py"


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_cannot_be_traced_says_why(
    name: str, capsys: pytest.CaptureFixture[str], own: Path
) -> None:
    build, said = STEPS[name]
    assert_one_line(capsys, [own_target(own, build)], said)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_builds_no_step_says_what_it_should(
    name: str, capsys: pytest.CaptureFixture[str], own: Path
) -> None:
    build, said = FUNCTIONS[name]
    assert_one_line(capsys, [own_target(own, build)], said)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_imported_says_where(
    name: str, capsys: pytest.CaptureFixture[str], own: Path
) -> None:
    text, said = FILES[name]
    assert_one_line(capsys, [own_target(own, "", text)], said)


@pytest.mark.parametrize("name", USAGES)
def test_a_wrong_usage_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    args, said = USAGES[name]
    assert_one_line(capsys, args, said)


def test_a_step_without_blocks_cannot_be_compared(capsys: pytest.CaptureFixture[str], own: Path) -> None:
    text = OWN.replace("self.layers = [", "self.layers = nn.Sequential(*[").replace("range(4)]", "range(1)])")
    text = text.replace("for layer in self.layers:\n            x = layer(x) + x", "x = x @ x.T @ x")
    target = own_target(own, "def build(): return lambda x: x.sum(), (x,), []", text)
    assert_one_line(capsys, [target, "--compare", "every"], ["every recomputes blocks", "has none"])
