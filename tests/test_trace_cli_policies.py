"""``oomguard trace`` as adviser: which checkpointing fits a budget, on which machine, in which order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_trace_cli import OWN, TINY, own, own_target, run, run_json  # noqa: F401, a fixture

from oomguard.config.policy import EVERY_BLOCK, NO_CHECKPOINT, CheckpointPolicy
from oomguard.config.presets import preset
from oomguard.config.step import StepConfig
from oomguard.machine.device import find_device
from oomguard.model.step import build_step
from oomguard.plan.engines import trace_preset
from oomguard.trace.policies import Policies, Price

BUILD = "def build(): return update, (x,), [model, optimizer]"


def prices() -> Policies:
    return Policies.of_built(build_step(preset("tiny"), StepConfig(batch=2, seq_len=32), evaluated=False))


def most(price: Price) -> int:
    return max(price.peak_bytes, price.first_peak_bytes)


def between() -> int:
    """A budget that no recompute passes and recomputing some blocks keeps."""
    policies = prices()
    plain, every = policies.price(NO_CHECKPOINT), policies.price(EVERY_BLOCK)
    return (most(plain) + most(every)) // 2


def test_policies_are_those_of_one_capture(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, *TINY, "--policies")
    told = {p["checkpoint"]: (p["peak_bytes"], p["first_peak_bytes"]) for p in found["policies"]}
    assert told == {str(p.policy): (p.peak_bytes, p.first_peak_bytes) for p in prices().table()}
    assert found["policies"][0]["peak_bytes"] == pytest.approx(found["peak_bytes"], rel=0.005)
    assert (found["cheapest"], found["policies"][0]["fits"]) == (None, None)


def test_policies_are_a_table_that_marks_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, *TINY, "--policies", "--budget", f"{between()}B")
    assert status == 1
    table = out[out.index("Checkpoint policies") :].split("\n\n")[0].splitlines()
    marked = [line for line in table if line.startswith(">")]
    assert len(marked) == 1
    assert "the least recompute that fits" in marked[0]
    assert "does not fit" in next(line for line in table if " none " in line)
    assert max(map(len, out.splitlines())) <= 80


def test_over_the_budget_the_least_recompute_that_fits_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    budget = between()
    status, out, _ = run(capsys, *TINY, "--budget", f"{budget}B", "--json")
    found = json.loads(out)
    price = prices().cheapest(budget)
    assert (status, found["fits"], found["cheapest"]) == (1, False, str(price.policy))
    assert found["policies"] == [
        {
            "checkpoint": str(price.policy),
            "peak_bytes": price.peak_bytes,
            "first_peak_bytes": price.first_peak_bytes,
            "recomputed_share": pytest.approx(price.share, abs=1e-4),
            "largest_buffer_bytes": price.largest_buffer_bytes,
            "fits": True,
        }
    ]
    _, out, _ = run(capsys, *TINY, "--budget", f"{budget}B")
    assert "The least recompute that fits: " in out
    assert f'oomguard.checkpoint_layers(layers, "{price.policy}")' in " ".join(out.split())


def test_what_it_names_fits_when_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    budget = between()
    _, out, _ = run(capsys, *TINY, "--budget", f"{budget}B", "--json")
    policy = json.loads(out)["cheapest"]
    assert run(capsys, *TINY, "--grad-checkpoint", policy, "--budget", f"{budget}B")[0] == 0


def test_where_no_policy_fits_the_least_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, *TINY, "--budget", "1MiB")
    assert status == 1
    assert "No checkpointing fits; the least is " in out
    _, out, _ = run(capsys, *TINY, "--budget", "1MiB", "--json")
    assert json.loads(out)["cheapest"] is None


def test_a_step_of_ones_own_is_told_what_fits(capsys: pytest.CaptureFixture[str], own: Path) -> None:  # noqa: F811
    target = own_target(own, BUILD)
    plain = run_json(capsys, "trace", target, "--policies")
    least = min(p["peak_bytes"] for p in plain["policies"])
    assert least < plain["peak_bytes"]
    status, out, _ = run(capsys, "trace", target, "--budget", f"{plain['peak_bytes'] - 1}B", "--json")
    assert status == 1
    assert json.loads(out)["cheapest"] in {f"blocks={n}" for n in range(1, 4)} | {"every"}


def test_a_residual_between_the_blocks_leaves_no_strides(
    capsys: pytest.CaptureFixture[str],
    own: Path,  # noqa: F811
) -> None:
    target = own_target(own, BUILD)
    found = run_json(capsys, "trace", target, "--policies", "--budget", "1GiB")
    assert {p["checkpoint"] for p in found["policies"]} == {"none", "every", "custom_function"}
    status, _, err = run(capsys, "trace", target, "--compare", "stride=2")
    assert (status, err.count("\n")) == (2, 1)
    assert "use every or blocks=N" in err


def test_a_step_that_recomputes_is_priced_as_plain_code(
    capsys: pytest.CaptureFixture[str],
    own: Path,  # noqa: F811
) -> None:
    evaluated = "mx.eval(model.state, optimizer.state, x)\n"  # so that both begin where a task does
    plain = run_json(capsys, "trace", own_target(own, evaluated + BUILD), "--policies")
    other = own.with_name("other_" + own.name)
    every = (
        "from oomguard.model.checkpoint import checkpoint_layers\ncheckpoint_layers(model.layers, 'every')\n"
    )
    found = run_json(capsys, "trace", own_target(other, evaluated + every + BUILD), "--policies")
    peaks = [{p["checkpoint"]: p["peak_bytes"] for p in run["policies"]} for run in (plain, found)]
    assert peaks[0] == peaks[1]


def test_a_case_that_recomputes_has_no_other_policies(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "trace", "--case", "mlp-every", "--policies")
    assert (status, err.count("\n")) == (2, 1)
    assert "recomputes already" in err
    status, out, _ = run(capsys, "trace", "--case", "mlp-every", "--budget", "1MiB", "--json")
    assert (status, json.loads(out)["policies"]) == (1, None)


def test_a_step_without_blocks_is_over_its_budget_and_no_more_is_said(
    capsys: pytest.CaptureFixture[str],
    own: Path,  # noqa: F811
) -> None:
    before = OWN.replace("for _ in range(4)", "for _ in range(1)").replace(
        "self.layers = [", "self.only, = ["
    )
    before = before.replace("for layer in self.layers", "for layer in [self.only]")
    before = before.replace(
        "nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))", "nn.Linear(64, 64)"
    )
    status, out, _ = run(capsys, "trace", own_target(own, BUILD, before), "--budget", "1KiB")
    assert status == 1
    assert "checkpointing" not in out


def test_another_machine_is_simulated_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, *TINY, "--device", "m5-pro-48gb", "--grad-checkpoint", "every")
    step = StepConfig(batch=2, seq_len=32, checkpoint=CheckpointPolicy.parse("every"))
    expected = trace_preset(preset("tiny"), step, find_device("m5-pro-48gb"))
    assert (found["backend"], found["machine"]) == ("metal", "Apple M5 Pro, 48 GiB")
    assert found["peak_bytes"] == expected.peak_bytes
    _, out, _ = run(capsys, *TINY, "--device", "m5-pro-48gb")
    assert "Apple M5 Pro, 48 GiB (metal)" in " ".join(out.split())


@pytest.mark.parametrize("target", [["--case", "mlp"], ["FILE"]])
def test_another_machine_is_simulated_for_any_step(
    capsys: pytest.CaptureFixture[str],
    own: Path,  # noqa: F811
    target: list[str],
) -> None:
    target = [own_target(own, BUILD) if word == "FILE" else word for word in target]
    options = ["--device", "m4-16gb", "--sequenced", "--compare", "every", "--policies", "--budget", "auto"]
    found = run_json(capsys, "trace", *target, *options)
    assert found["backend"] == found["compared"]["backend"] == "metal"
    assert found["compared"]["peak_bytes"] < found["peak_bytes"]
    assert found["fits"] is True


def test_report_of_a_budget_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--budget", "auto"], ["--budget", "1MiB"], ["--device", "m5-pro-48gb", "--policies"]):
        _, out, _ = run(capsys, *TINY, *options)
        assert max(map(len, out.splitlines())) <= 80, options


def test_budget_auto_is_what_the_machine_has(capsys: pytest.CaptureFixture[str]) -> None:
    from oomguard.machine.budget import find_budget

    _, out, _ = run(capsys, *TINY, "--device", "m4-16gb", "--budget", "auto")
    assert "bound by: recommended working set" in out
    found = run_json(capsys, *TINY, "--device", "m4-16gb", "--budget", "auto")
    assert found["budget_bytes"] == find_budget(find_device("m4-16gb")).budget_bytes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "cuda-24gb"], ["CUDA", "m5-pro-48gb or cpu"]),
        (["--device", "m9-16gb"], ["unknown device 'm9-16gb'"]),
        (["--device", "metal", "--budget", "auto"], ["--device m5-pro-48gb", "--budget"]),
        (["--budget", "lots"], ["--budget", "lots"]),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], options: list[str], words: list[str]
) -> None:
    status, out, err = run(capsys, *TINY, *options)
    assert (status, out, err.count("\n")) == (2, "", 1)
    for word in words:
        assert word in err


def test_an_order_that_undoes_checkpointing_is_told(
    capsys: pytest.CaptureFixture[str],
    own: Path,  # noqa: F811
) -> None:
    backwards = OWN.replace("for layer in self.layers", "for layer in reversed(self.layers)")
    every = (
        "from oomguard.model.checkpoint import checkpoint_layers\ncheckpoint_layers(model.layers, 'every')\n"
    )
    target = own_target(own, every + BUILD, backwards.replace("range(4)", "range(12)"))
    found = run_json(capsys, "trace", target, "--compile")
    assert found["better_order"]["order"] == "reversed"
    assert found["better_order"]["peak_bytes"] < 0.9 * found["peak_bytes"]
    _, out, _ = run(capsys, "trace", target, "--compile")
    assert "reversed would peak at" in " ".join(out.split())
