"""What ``oomguard trace`` traces: the step of a preset, of a named case or of the user; each in the same terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oomguard.config.model import ModelConfig
from oomguard.config.policy import CheckpointPolicy
from oomguard.config.step import StepConfig, check_seq_len
from oomguard.errors import InputError

if TYPE_CHECKING:
    from oomguard.machine.device import Device
    from oomguard.trace.graph import Graph
    from oomguard.trace.policies import Policies
    from oomguard.trace.result import TraceResult

AS_WRITTEN = "as written"


@dataclass(frozen=True)
class Subject:
    """What is traced.

    Attributes:
        title, settings: what it is and how, in words.
        trace: simulates it as it is.
        under: simulates it under another checkpoint policy, and says that policy in words.
        policies: captures it once, for the prices of all of them.
        label, about: the policy it is under.
    """

    title: str
    settings: str
    trace: Callable[[], TraceResult]
    under: Callable[[CheckpointPolicy], tuple[str, TraceResult]]
    policies: Callable[[], Policies]
    label: str = AS_WRITTEN
    about: str = AS_WRITTEN


@dataclass(frozen=True)
class Simulated:
    """Where and how a step is simulated.

    Attributes:
        device: the machine.
        memory_limit: as given to ``mx.set_memory_limit``, in bytes; None for MLX's default.
        compiled: with ``mx.compile`` or without; None for as the step is written.
    """

    device: Device
    memory_limit: int | None
    compiled: bool | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """As ``engine.trace`` takes them."""
        return {"device": self.device, "memory_limit": self.memory_limit, "compiled": self.compiled}


def preset_subject(model: ModelConfig, step: StepConfig, how: Simulated) -> Subject:
    """A step of the preset GPT; under another policy it is built again.

    Raises:
        InputError: a sequence longer than the model's context.
    """
    from oomguard.plan.engines import preset_policies, trace_preset
    from oomguard.report.words import say_batch, say_model, say_policy, say_step

    check_seq_len(model, step)

    def under(policy: CheckpointPolicy) -> tuple[str, TraceResult]:
        found = trace_preset(model, step.but(checkpoint=policy), how.device, how.memory_limit)
        return say_policy(policy, model.n_layers), found

    about = say_policy(step.checkpoint, model.n_layers)
    return Subject(
        title=say_model(model),
        settings=f"{say_batch(step)}, {about}, {say_step(step)}",
        trace=lambda: under(step.checkpoint)[1],
        under=under,
        policies=lambda: preset_policies(model, step, how.device, how.memory_limit),
        label=str(step.checkpoint),
        about=about,
    )


def case_subject(name: str, how: Simulated) -> Subject:
    """A named case.

    Raises:
        InputError: no case of that name.
    """
    from oomguard.model.cases import CASES, build_case, check_case

    check_case(name)
    return _built(lambda: build_case(name, evaluated=False), f"case {name}: {CASES[name].about}", how)


def function_subject(target: str, how: Simulated) -> Subject:
    """The step that the user's ``FILE.py:FUNCTION`` builds.

    Raises:
        InputError: no such file or function, it raises, or it returns something else.
    """
    from oomguard.step.opening import load_step

    user = load_step(target)
    step = user.step
    if step is None:
        return _built(lambda: user.built, target, how)

    def trace_as_is() -> TraceResult:
        from oomguard.trace.engine import trace

        return trace(
            step,
            *user.arguments,
            state=user.state,
            keywords=user.keywords,
            evaluate=user.evaluate,
            **how.keywords,
        )

    def under(policy: CheckpointPolicy) -> tuple[str, TraceResult]:
        from oomguard.trace.engine import capture_for, simulate
        from oomguard.trace.policies import MARKED

        # The policy stands alone: what the step itself would recompute is taken as plain code.
        captured, device, around = capture_for(
            step,
            user.arguments,
            user.keywords,
            state=user.state,
            evaluate=user.evaluate,
            device=how.device,
            marked=MARKED,
            plain=True,
        )
        rewriting = _Rewriting(policy)
        result = simulate(
            captured,
            compiled=captured.compiled if how.compiled is None else how.compiled,
            device=device,
            memory_limit=how.memory_limit,
            rewrite=rewriting,
            surroundings=around,
        )
        return rewriting.about, result

    def policies() -> Policies:
        from oomguard.trace.policies import Policies

        return Policies.of_step(
            step,
            user.arguments,
            user.keywords,
            state=user.state,
            evaluate=user.evaluate,
            **how.keywords,
        )

    return Subject(target, "", trace_as_is, under, policies)


def _built(build: Callable[[], Any], title: str, how: Simulated) -> Subject:
    """A step that says which calls an update makes; under another policy its graph is rewritten."""

    def trace_as_is() -> TraceResult:
        from oomguard.trace.engine import trace_built

        return trace_built(build(), **how.keywords)

    def under(policy: CheckpointPolicy) -> tuple[str, TraceResult]:
        from oomguard.trace.engine import trace_built
        from oomguard.trace.policies import MARKED

        rewriting = _Rewriting(policy)
        result = trace_built(build(), rewrite=rewriting, marked=MARKED, **how.keywords)
        return rewriting.about, result

    def policies() -> Policies:
        from oomguard.trace.policies import Policies

        return Policies.of_built(build(), **how.keywords)

    return Subject(title, "", trace_as_is, under, policies)


class _Rewriting:
    """Puts a captured graph under a policy; ``about`` says it in words once the blocks are known."""

    def __init__(self, policy: CheckpointPolicy):
        self.policy = policy
        self.about = str(policy)

    def __call__(self, graph: Graph) -> Graph:
        from oomguard.report.words import say_policy
        from oomguard.trace.remat import apply_policy, block_calls

        if graph.recomputes:
            raise InputError(
                "--compare: the step recomputes already; name one that does not, and compare it with "
                f"{self.policy}"
            )
        self.about = say_policy(self.policy, len(block_calls(graph)))
        return apply_policy(graph, self.policy)
