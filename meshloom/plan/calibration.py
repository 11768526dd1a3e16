"""Calibration: what the cost model says of runs that were measured, and constants that explain them.

Owns: which measured phase is which part of the cost model, and how far a measurement is trusted. Refuses to know: files, run
folders. Always holds: a run is predicted by the same forecast that its plan is made of, at the lengths that its samples had.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshloom.config.settings import SftSettings, TrainSettings
from meshloom.plan.constants import Cluster, Constants
from meshloom.plan.decoder_numbers import DecoderNumbers
from meshloom.plan.fit_constants import Fit, Measurement, fit
from meshloom.plan.forecast import Forecast, Lengths, forecast
from meshloom.plan.layout import Layout
from meshloom.plan.placement import Role
from meshloom.plan.residency import Phase
from meshloom.plan.sft_outlook import sft_forecast, sft_role

BESIDE = "beside phases"
"""What a step takes that is no phase: rewards, records, packing."""
_PARTS: dict[str, tuple[Role, Phase]] = {
    "generate": (Role.ROLLOUT, Phase.GENERATE),
    "score": (Role.REWARD, Phase.SCORE),
    "log_prob": (Role.ACTOR, Phase.LOGPROB),
    "reference": (Role.REFERENCE, Phase.LOGPROB),
    "values": (Role.CRITIC, Phase.VALUES),
    "critic": (Role.CRITIC, Phase.UPDATE),
    "update": (Role.ACTOR, Phase.UPDATE),
    "sync": (Role.ROLLOUT, Phase.SYNC),
}
PREDICTED = (*_PARTS, BESIDE)
"""Measured parts of a step that the cost model has a prediction for."""
_RELATIVE, _CLOCK_S = 0.02, 0.005
"""Spread of a measurement at least, as a share and in seconds: what the model leaves out, and what a phase's edges cost."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A part of a step over the steps that count.

    Args:
        seconds: their median.
        spread: of that median, as a share of it.
    """

    seconds: float
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run and what was measured.

    Args:
        name: for people.
        settings: of the run.
        model: in numbers.
        adapters: parameters of adapters; none where all are trained.
        layout: where its roles were.
        cluster: what its devices were.
        recompute: whether layers were recomputed.
        lengths: of the samples of a usual step.
        parts: of a step, by their names: phases, and ``BESIDE``.
        step_s: of a usual step.
        steps: that count.
        device_memory: bytes that the run found free; none for what the device has.
        peaks: most bytes of tensors on the device in each phase, by its measured name; empty where they were not measured.
    """

    name: str
    settings: TrainSettings | SftSettings
    model: DecoderNumbers
    adapters: int | None
    layout: Layout
    cluster: Cluster
    recompute: bool
    lengths: Lengths
    parts: Mapping[str, Seen]
    step_s: float
    steps: int
    device_memory: int | None = None
    peaks: Mapping[str, int] = field(default_factory=dict)

    def forecast(self, constants: Constants) -> Forecast:
        """What the cost model says of a usual step."""
        if isinstance(self.settings, SftSettings):
            found, numbers = self.layout.role(Role.ACTOR), {"recompute": self.recompute, "adapters": self.adapters}
            role = sft_role(self.settings, found, self.model, **numbers)
            return sft_forecast(self.settings, self.layout, role, self.lengths, self.cluster, constants)
        return forecast(
            self.settings,
            self.model,
            self.layout,
            self.cluster,
            recompute=self.recompute,
            adapters=self.adapters,
            lengths=self.lengths,
            constants=constants,
            device_memory=self.device_memory,
        )

    def predicted(self, constants: Constants) -> dict[str, float]:
        """Seconds of each part of ``PREDICTED`` in a usual step; 0 where there is nothing to do."""
        found = self.forecast(constants)
        seconds = {name: found.seconds(*part) for name, part in _PARTS.items()}
        if isinstance(self.settings, SftSettings):  # an optimizer that is elsewhere comes and goes in the update
            seconds["update"] += sum(part.seconds for part in found.offload)
        return {**seconds, BESIDE: constants.beside_phases_s}


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A part of a run's step.

    Args:
        run: its name.
        part: phase, ``BESIDE`` or ``step``.
        measured: seconds.
        before: what the constants said before.
        after: what they say after the fit.
    """

    run: str
    part: str
    measured: float
    before: float
    after: float


def calibrate(runs: Sequence[MeasuredRun], start: Constants | None = None) -> Fit:
    """Constants that explain the runs best.

    Args:
        runs: at least one; of different sizes and lengths they tell more constants apart.
        start: what the constants are taken to be before; none for those that were measured on one H200.
    """
    start = start or Constants()
    chosen = [(run, name) for run in runs for name in _fittable(run, start)]
    measured = [_measurement(run, name) for run, name in chosen]

    def predict(constants: Constants) -> list[float]:
        said = {id(run): run.predicted(constants) for run in runs}
        return [said[id(run)][name] for run, name in chosen]

    return fit(predict, measured, start)


def _fittable(run: MeasuredRun, start: Constants) -> list[str]:
    """Parts that were measured and that the model has something to say about."""
    predicted = run.predicted(start)
    return [name for name in PREDICTED if predicted[name] > 0 and name in run.parts and run.parts[name].seconds > 0]


def _measurement(run: MeasuredRun, name: str) -> Measurement:
    seen = run.parts[name]
    spread = math.hypot(_RELATIVE, _CLOCK_S / seen.seconds, seen.spread)
    return Measurement(name=f"{name} of {run.name}", seconds=seen.seconds, spread=spread)


def compare(run: MeasuredRun, before: Constants, after: Constants) -> list[Compared]:
    """Predicted against measured, part by part, and the whole step last."""
    old, new = run.predicted(before), run.predicted(after)
    rows = [
        Compared(run=run.name, part=name, measured=run.parts[name].seconds, before=old[name], after=new[name])
        for name in PREDICTED
        if name in run.parts
    ]
    steps = [run.forecast(constants).step_s for constants in (before, after)]
    return [*rows, Compared(run=run.name, part="step", measured=run.step_s, before=steps[0], after=steps[1])]


@dataclass(frozen=True, kw_only=True)
class Held:
    """Memory of a phase.

    Args:
        run: its name.
        part: the phase, by its measured name.
        measured: most bytes of tensors at once.
        predicted: what the memory ledger has for it.
    """

    run: str
    part: str
    measured: int
    predicted: int


def held(run: MeasuredRun) -> list[Held]:
    """Peaks of the memory ledger against measured ones, phase by phase; of the run's fullest devices."""
    groups = run.forecast(Constants()).groups
    return [
        Held(
            run=run.name,
            part=name,
            measured=run.peaks[name],
            predicted=max(group.ledger.held(phase) for group in groups if role in group.roles),
        )
        for name, (role, phase) in _PARTS.items()
        if name in run.peaks and any(role in group.roles for group in groups)
    ]


def not_predicted(run: MeasuredRun, start: Constants) -> dict[str, str]:
    """Measured parts that the fit leaves out, and why."""
    predicted = run.predicted(start)
    reasons = {}
    for name, seen in run.parts.items():
        if name not in predicted:
            reasons[name] = "the cost model has no such part of a step"
        elif predicted[name] == 0 and seen.seconds > 0:
            reasons[name] = "by the cost model there is nothing to do in it"
    return reasons
