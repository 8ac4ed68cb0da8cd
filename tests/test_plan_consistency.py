"""One answer in four forms: text, JSON, Python and exit status never contradict each other, whatever is asked."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from local_rows import run

from oomguard.cli.plan import command as plan_command
from oomguard.errors import InputError
from oomguard.plan.planner import plan
from oomguard.report.as_json import plan_json
from oomguard.report.plan_text import plan_text
from oomguard.report.words import say_policy
from oomguard.units import format_bytes

DEVICES = ("cpu-16gb", "cpu-64gb", "m5-pro-48gb", "m5-24gb", "metal-16gb", "metal-128gb", "cuda-24gb")
SIZE = re.compile(r"(?<![\w.])\d[\d.]* (?:B|[KMGT]iB)\b")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOMGUARD_HOME", str(tmp_path / "home"))


def option(name: str, values: st.SearchStrategy[object]) -> st.SearchStrategy[list[str]]:
    """The option or nothing."""
    return st.one_of(st.just([]), values.map(lambda value: [name, str(value)]))


SIZES = st.one_of(
    st.integers(4, 4000).map(lambda n: f"{n}MiB"),
    st.integers(1, 64).map(lambda n: f"{n}GB"),
    st.sampled_from(["300MB", "1GB", "2GB", "8GiB", "32GiB", "1B"]),
)
REQUESTS = st.tuples(
    st.sampled_from(["tiny", "small", "huge", "mega", "behemoth", "titan"]).map(
        lambda name: ["--preset", name]
    ),
    st.sampled_from(DEVICES).map(lambda name: ["--device", name]),
    SIZES.map(lambda size: ["--memory", size]),
    option("--batch", st.sampled_from([1, 2, 3, 8, 64])),
    option(
        "--grad-checkpoint", st.sampled_from(["none", "every", "attention", "blocks=2", "sqrt", "stride=2"])
    ),
    option("--accumulate", st.sampled_from([1, 2, 4])),
    option("--target-batch", st.sampled_from([1, 7, 24, 64, 96])),
    option("--dtype", st.sampled_from(["bf16", "fp32"])),
    option("--optimizer", st.sampled_from(["sgd", "lion", "adafactor", "muon"])),
    option("--ctx", st.sampled_from([16, 64, 128])),
    option("--headroom", st.sampled_from(["10%", "64MiB", "0"])),
    st.sampled_from([[], [], ["--clip"], ["--no-compile"]]),
).map(lambda parts: [word for part in parts for word in part])


def ask(words: list[str]) -> tuple[int, dict[str, Any]]:
    """Status and JSON of a plan."""
    status, out, err = run("plan", *words, "--json")
    assert isinstance(status, int), err
    return status, json.loads(out) if status != 2 else {}


def numbers(value: Any) -> Iterator[int]:
    """Every whole number of a JSON object."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from numbers(part)
    elif isinstance(value, int):
        yield value


def setting(candidate: dict[str, Any]) -> list[str]:
    """The options that ask for one candidate."""
    spelled = candidate["checkpoint"]
    policy = spelled["policy"]
    if policy == "stride":
        policy = f"stride={spelled['stride']}"
    elif spelled["blocks"] is not None:
        policy = f"{'attention,' if policy == 'attention' else ''}blocks={spelled['blocks']}"
    return [
        *("--batch", str(candidate["batch"]), "--accumulate", str(candidate["accumulate"])),
        *("--grad-checkpoint", policy),
    ]


def same_step(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[key] == other[key] for key in ("batch", "accumulate", "seq_len", "checkpoint"))


def asked_in_python(words: list[str]) -> dict[str, Any]:
    """The keyword arguments of ``oomguard.plan`` for a command line."""
    given_values = dict(plan_command.make_context("plan", list(words)).params)
    for name in ("as_json", "config"):
        given_values.pop(name)
    for old, new in (("preset", "model"), ("ctx_tokens", "seq_len"), ("clip", "clip_norm")):
        given_values[new] = given_values.pop(old)
    return given_values


def check_json(words: list[str], status: int, found: dict[str, Any]) -> None:
    budget, largest = found["budget"]["budget_bytes"], found["budget"]["largest_buffer_bytes"]
    choice, candidates = found["choice"], found["candidates"]
    assert (status == 0) == (choice is not None) == any(c["fits"] for c in candidates)
    beside = [c for c in (choice, found["next_up"], found["ceiling"], found["least"], found["smallest"]) if c]
    for candidate in (*candidates, *beside, *(relief["candidate"] for relief in found["reliefs"])):
        assert sum(candidate["breakdown"].values()) == candidate["peak_bytes"]
        assert min(candidate["breakdown"].values()) >= 0
        assert candidate["low_bytes"] <= candidate["peak_bytes"] <= candidate["high_bytes"]
        assert candidate["cache_limit_bytes"] <= max(candidate["peak_bytes"], 32 << 20)
    for candidate in candidates:
        small_enough = largest is None or candidate["largest_tensor_bytes"] <= largest
        assert candidate["fits"] == (candidate["high_bytes"] <= budget and small_enough)
        assert candidate["headroom_bytes"] == budget - candidate["high_bytes"]
        assert not candidate["fits"] or candidate["tokens_per_second"] <= choice["tokens_per_second"]
        assert not candidate["fits"] or candidate["footprint_bytes"] <= budget
    if choice is not None:
        assert choice in candidates
        assert (found["least"], found["smallest"], found["reliefs"]) == (None, None, [])


def check_asked_again(words: list[str], found: dict[str, Any]) -> None:
    """What is claimed of another setting is what a plan of that setting says."""
    claims = [(found["choice"], 0), (found["ceiling"], 0), (found["next_up"], 1), (found["least"], 1)]
    for candidate, expected in claims:
        if candidate is not None:
            status, again = ask([*words, *setting(candidate)])
            assert status == expected, setting(candidate)
            shown = again["choice"] or again["least"]
            assert shown["high_bytes"] == candidate["high_bytes"]
    for relief in found["reliefs"]:
        status, again = ask([*words, *shlex.split(relief["options"])])
        assert status == 0, relief["options"]
        if not relief["options"].startswith("--memory"):
            assert same_step(again["choice"], relief["candidate"]), relief["options"]


def check_text(words: list[str], status: int, text: str, found: dict[str, Any]) -> None:
    flat = re.sub(r"\s+", " ", text)
    choice, up, ceiling = found["choice"], found["next_up"], found["ceiling"]
    n_layers = found["request"]["model"]["n_layers"]
    assert ("Fits: " in flat) == (status == 0) == ("oomguard train" in flat)
    assert ("Does not fit: " in flat) == (status == 1)
    assert ("Next up: " in flat) == (up is not None)
    if up is not None:
        assert f"Next up: batch {up['batch']} " in flat
        assert not up["fits"]
    alone = re.search(r"Of batch (\d+)(?: x \d+ accumulated)? only the in-flight window is too much", flat)
    if alone is not None:
        assert int(alone[1]) == up["batch"]
        assert up["sequenced_high_bytes"] <= found["budget"]["budget_bytes"] < up["high_bytes"]
    if "A larger batch buys nothing here" in flat:
        assert f"up to batch {ceiling['batch']} " in flat
        assert ceiling["batch"] > choice["batch"]
        assert f"already has {choice['tokens_per_second'] / ceiling['tokens_per_second']:.1%} of" in flat
    assert all(c["batch"] <= (found["grows_to"] or c["batch"]) for c in found["candidates"] if c["fits"])
    if "No batch in the table" in flat:
        assert f"is above {found['grows_to']}: " in flat
    ends = re.search(r"Batch (\d+)(?: x \d+ accumulated)? with every block recomputed", flat)
    if ends is not None:
        assert int(ends[1]) == found["tradeoff"]["every"]["batch"]
        assert found["tradeoff"]["every"]["fits"]
    without = re.search(r"; (\d+) without recompute", flat)
    if without is not None:
        plain = found["tradeoff"]["plain"]
        assert int(without[1]) == plain["batch"]
        assert plain["fits"]
        if choice["checkpoint"]["policy"] == "none":
            assert plain["batch"] == ceiling["batch"]
    for relief in found["reliefs"]:
        assert relief["options"] in flat
    assert [line for line in text.splitlines() if len(line) > 80 and "oomguard train" not in line] == []
    rows = [line for line in text.splitlines() if re.match(r">? +\d+( x \d+)?  +\S+  +[\d.]+ \w+ ", line)]
    assert len(rows) == len(found["candidates"])
    for row, candidate in zip(rows, found["candidates"], strict=True):
        assert row.endswith("does not fit") != candidate["fits"]
        assert row.startswith(">") == (candidate is found["candidates"][0] and choice is not None)
        assert f"  {format_bytes(candidate['peak_bytes'])}  " in row
        speed = re.search(r" ([\d,.]+|\?)(  does not fit)?$", row)
        assert speed is not None
        assert float(speed[1].replace(",", "")) == candidate["tokens_per_second"]
    if choice is not None:
        policy = say_policy(plan(**asked_in_python(words)).choice.policy, n_layers)  # type: ignore[union-attr]
        assert policy in flat
    check_sizes(text, found)


def check_sizes(text: str, found: dict[str, Any]) -> None:
    """Every size on screen is one of the JSON's; ``the rest`` sums up slivers."""
    known = {format_bytes(abs(number)) for number in numbers(found)}
    shown = re.sub(re.escape(found["device"]["name"]), "", text.replace("\n", " "))
    for warning in found["warnings"]:
        shown = re.sub(r"\s+".join(map(re.escape, warning.split())), "", shown)
    shown = re.sub(r"the rest +[\d.]+ \w+", "", shown)
    assert set(SIZE.findall(shown)) <= known


def check_run(words: list[str], text: str, found: dict[str, Any]) -> None:
    """The command to run is the choice."""
    line = text[text.index("oomguard train") :].splitlines()[0]
    train = shlex.split(line.replace("--corpus FILE", ""))[2:]
    status, again = ask([*train, "--device", words[words.index("--device") + 1]])
    assert status == 0
    assert same_step(again["choice"], found["choice"])
    assert again["choice"]["high_bytes"] == found["choice"]["high_bytes"]
    assert again["budget"]["budget_bytes"] == found["budget"]["budget_bytes"]


def check(words: list[str]) -> None:
    """Everything one request says, in all its forms."""
    status, text, err = run("plan", *words)
    in_json, out, json_err = run("plan", *words, "--json")
    assert (status, err) == (in_json, json_err)
    if status == 2:
        assert (text, out, err.count("\n")) == ("", "", 1)
        return
    found = json.loads(out)
    assert found == json.loads(json.dumps(plan_json(plan(**asked_in_python(words)))))
    check_json(words, int(status or 0), found)
    check_text(words, int(status or 0), text, found)
    check_asked_again(words, found)
    if status == 0:
        check_run(words, text, found)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(words=REQUESTS)
def test_text_json_python_and_status_never_contradict_each_other(words: list[str]) -> None:
    check(words)


TYPED = [
    "--preset huge --device cpu-16gb --memory 176MB --target-batch 7",
    "--preset huge --device cpu-16gb --memory 176MB --target-batch 8 --accumulate 4 --grad-checkpoint none",
    "--preset huge --device cpu-16gb --memory 1GB --batch 64 --grad-checkpoint none",
    "--preset huge --device cpu-16gb --memory 100MB --batch 8 --accumulate 4",
    "--preset huge --device cpu-16gb --memory 300MB --batch 64 --accumulate 2 --grad-checkpoint none",
    "--preset titan --device m5-pro-48gb --memory 16GB",
    "--preset tiny --device m5-pro-48gb --memory 32GiB",
    "--preset tiny --device metal-128gb --memory 100GB",
    "--preset huge --device cpu-16gb --memory 2GB --grad-checkpoint sqrt",
    "--preset tiny --device cpu-16gb --memory 1B",
    "--preset behemoth --device m5-24gb --memory 16GB --headroom 10% --batch 4",
]


@pytest.mark.parametrize("words", TYPED)
def test_request_that_once_contradicted_itself_does_not(words: str) -> None:
    check(words.split())


def test_every_spelling_of_a_policy_in_help_message_and_readme_is_read() -> None:
    from oomguard.config.policy import CheckpointPolicy

    help_of = next(
        o.help for o in plan_command.params if isinstance(o, click.Option) and o.name == "grad_checkpoint"
    )
    message = run("plan", "--preset", "tiny", "--grad-checkpoint", "evry")[2].partition("choose auto, ")[2]
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    table = re.findall(r"^\| (`.*?`) \|", readme, re.M)
    spellings = re.split(r", | or ", (help_of or "").rstrip("."))
    spellings += re.split(r", | or ", message.strip())
    spellings += [name for cell in table for name in re.findall(r"`([^`]+)`", cell)]
    assert len(spellings) >= 27
    for spelling in spellings:
        CheckpointPolicy.parse(spelling.replace("=K", "=4").replace("=N", "=2"))
    assert CheckpointPolicy.parse("sqrt") == CheckpointPolicy.parse("stride=sqrt")


TRACED = [
    "--preset tiny --device cpu-16gb --memory 8GB",
    "--preset tiny --device cpu-16gb --memory 150MB",
    "--preset tiny --device m5-pro-48gb --memory 1GB --grad-checkpoint every",
    "--preset tiny --device cpu-16gb --memory 40MB --batch 32 --grad-checkpoint none",
]


@pytest.mark.parametrize("words", TRACED)
def test_engine_trace_traces_the_choice_and_marks_every_row(words: str) -> None:
    asked = [*words.split(), "--engine", "trace"]
    answered = plan(**asked_in_python(asked))
    text, found = plan_text(answered), plan_json(answered)
    check_json(asked, 0 if answered.fits else 1, found)
    check_sizes(text, found)
    near = [found[name] for name in ("choice", "next_up", "ceiling", "least") if found[name] is not None]
    assert near
    assert {candidate["engine"] for candidate in near} == {"trace"}
    rows = [line for line in text.splitlines() if re.match(r">? +\d+( x \d+)?  +\S+  +[\d.]+ \w+ ", line)]
    assert [re.search(r" (trace|estimate) ", row)[1] for row in rows] == [  # type: ignore[index]
        candidate["engine"] for candidate in found["candidates"]
    ]
    for relief in found["reliefs"]:
        assert relief["candidate"]["engine"] == "trace"
        again = plan(**asked_in_python([*asked, *shlex.split(relief["options"])]))
        assert again.fits, relief["options"]


def size_options() -> list[tuple[str, click.Option]]:
    """Every option of every command that takes a size."""
    from oomguard.cli.main import cli

    commands = {
        name: cli.get_command(click.Context(cli), name) for name in cli.list_commands(click.Context(cli))
    }
    return [
        (f"{name} {parameter.opts[0]}", parameter)
        for name, found in commands.items()
        if found is not None
        for parameter in found.params
        if isinstance(parameter, click.Option) and parameter.type.name in ("memory", "size", "headroom")
    ]


@pytest.mark.parametrize(
    ("name", "parameter"), size_options(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_size_without_a_unit_is_refused_with_what_to_write(name: str, parameter: click.Option) -> None:
    for text in ("32", "5", "1.5"):
        with pytest.raises(InputError, match=f"{parameter.opts[0]}: '{text}' has no unit; write .*{text}GiB"):
            parameter.type.convert(text, parameter, None)
    assert parameter.type.convert("32MiB", parameter, None) is not None


def test_every_command_with_a_size_is_among_those_that_refuse_one_without_a_unit() -> None:
    names = {name.split()[0] for name, _ in size_options()}
    assert names >= {"plan", "train", "trace", "measure"}


def test_size_in_python_is_bytes_as_a_number_and_needs_a_unit_as_a_text() -> None:
    assert plan("tiny", device="cpu-16gb", memory=200 << 20).budget.budget_bytes == 200 << 20
    for name, text in (("memory", "32"), ("headroom", "5")):
        with pytest.raises(InputError, match="has no unit; write"):
            plan("tiny", device="cpu-16gb", **{name: text})  # type: ignore[arg-type]
