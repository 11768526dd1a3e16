"""A side of the GPU benchmarks' training runs while it runs: its process, its steps as they end, and what came of it."""

import math
import time
from dataclasses import dataclass

from gpu_common import Ended, tail_of, watch
from gpu_sides import Job, Side, Step
from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class SideRun:
    """What a side did.

    Args:
        clocks: when each of its steps was done or first seen to be, in seconds since its command.
    """

    name: str
    steps: list[Step]
    clocks: dict[int, float]
    ended: Ended

    @property
    def first_step_s(self) -> float:
        """Seconds from the command to the end of the first trained step."""
        return self.clocks.get(1, math.nan)

    @property
    def counted(self) -> list[Step]:
        """Steps after the first."""
        return [step for step in self.steps if step.number > 1 and step.seconds is not None]


def run_side(out: Console, side: Side, job: Job, deadline_s: float) -> SideRun | None:
    """Run a side, saying each step as it ends; none if it did not train a step."""
    if (package := side.missing()) is not None:
        out.print(f"{side.name}: not measured, {package} is not installed (see --peer-path)")
        return None
    clocks: dict[int, float] = {}
    command, began = side.command(job), time.time()

    def done() -> bool:
        for step in side.steps(job):
            if step.number not in clocks:
                clocks[step.number] = (step.clock or time.time()) - began
                say(out, side, step, clocks[step.number])
        return job.steps in clocks and side.is_over(job)

    ended = watch(command, job.work / "log", done=done, deadline_s=deadline_s, environment=side.environment())
    steps = side.steps(job)
    if job.steps not in clocks:
        why = "ran out of time" if ended.code is None else f"ended with {ended.code}"
        out.print(f"{side.name}: {why} after step {max(clocks, default=0)}\n{tail_of(job.work / 'log')}", markup=False)
    return SideRun(name=side.name, steps=steps, clocks=clocks, ended=ended) if max(clocks, default=0) > 0 else None


def say(out: Console, side: Side, step: Step, clock: float) -> None:
    """One line on a step that has ended."""
    parts = [f"{side.name} step {step.number} at {clock:.1f} s"]
    if step.seconds is not None:
        parts.append(f"{step.seconds:.2f} s")
    parts += [f"{name} {seconds:.2f}" for name, seconds in step.phases.items()]
    if step.accuracy is not None:
        parts.append(f"accuracy {step.accuracy:.3f}")
    out.print(", ".join([*parts, f"reward {step.reward:.3f}, {step.tokens:,.0f} tokens"]), markup=False)
