"""Fitting constants to measurements: the most likely ones, given what they were taken to be and what was measured.

Owns: the fit, and which constants measurements say anything about. Refuses to know: runs, phases, what is measured. Always
holds: a constant stays within what is physically possible; one that measurements say little about stays as it was, and the
reason is said.

The logarithm of a constant is taken to lie around its first value with a spread that says how well it is known; measured
seconds lie around the predicted ones with a spread of their own. The sum of squares over both spreads is made least
(Gauss–Newton with bounds, from several points: where a time is the longer of two, there can be a least sum on either side).
A constant counts as fitted if its spread shrinks by enough; the others are put back, and the rest
is fitted again.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshloom.plan.constants import NAMES, Constants, bounds_of

_SPREADS = {
    "memory_share": 0.1,
    "activation_passes": 0.3,
    "forward_part": 0.2,
    "decode_layer_s": 0.5,
    "pass_layer_s": 0.5,
    "generate_start_s": 1.5,
    "update_start_s": 1.5,
    "beside_phases_s": 2.0,
    "gather_share": 0.5,
    "broadcast_share": 0.5,
    "copy_share": 0.7,
    "collective_s": 1.0,
    "disk_bandwidth": 1.5,
}
_SPREAD = 0.3
"""How well a constant is known before anything is measured: the spread of its logarithm."""
_OF_LAUNCHES = ("decode_layer_s", "pass_layer_s")
"""Of times that count only where they are longer than what is launched."""
_STEPS, _HALVINGS, _DIFFERENCE = 40, 12, 1e-4
_SMALLEST_GAIN = 0.25
"""Part of a constant's variance that measurements must take away for it to count as fitted."""
_SMALLEST_SHARE = 0.02


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Seconds that were measured.

    Args:
        name: what took them.
        seconds: how many.
        spread: of their logarithm, by noise.
    """

    name: str
    seconds: float
    spread: float


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What came of it.

    Args:
        constants: all, those that are not fitted as they were.
        fitted: names, with the part of each one's variance that is gone.
        at_bound: fitted ones that stopped at what is physically possible.
        unfitted: why each of the others is not fitted.
    """

    constants: Constants
    fitted: dict[str, float]
    at_bound: tuple[str, ...]
    unfitted: dict[str, str]


Predict = Callable[[Constants], Sequence[float]]
"""Seconds of all measurements, in their order."""


def fit(predict: Predict, measured: Sequence[Measurement], start: Constants) -> Fit:
    """The constants that explain measurements best.

    Args:
        predict: positive seconds of what was measured, for some constants.
        measured: at least one.
        start: what the constants are taken to be before.
    """
    problem = _Problem(predict, tuple(measured), start)
    free = list(NAMES)
    unfitted: dict[str, str] = {}
    while True:
        found = problem.solve(free)
        jacobian = problem.jacobian(free, found)
        gains = problem.gains(free, jacobian)
        weak = [name for name in free if gains[name] < _SMALLEST_GAIN]
        if not weak:
            break
        unfitted |= {name: problem.reason(name, free, jacobian) for name in weak}
        free = [name for name in free if name not in weak]
    constants = problem.constants(free, found)
    at_bound = tuple(name for name in free if _is_at_bound(name, getattr(constants, name)))
    order = {name: unfitted[name] for name in NAMES if name in unfitted}
    return Fit(constants=constants, fitted=gains, at_bound=at_bound, unfitted=order)


def _is_at_bound(name: str, value: float) -> bool:
    return any(math.isclose(value, bound, rel_tol=1e-6) for bound in bounds_of(name))


class _Problem:
    """Least squares in the logarithms of constants, relative to their start."""

    def __init__(self, predict: Predict, measured: tuple[Measurement, ...], start: Constants) -> None:
        self.predict, self.measured, self.start = predict, measured, start
        self.target = np.log([each.seconds for each in measured])
        self.weight = np.array([1 / each.spread for each in measured])

    def constants(self, free: Sequence[str], x: np.ndarray) -> Constants:
        changes = {
            name: min(max(getattr(self.start, name) * math.exp(by), bounds_of(name)[0]), bounds_of(name)[1])
            for name, by in zip(free, x.tolist(), strict=True)
        }
        return replace(self.start, **changes)

    def residuals(self, free: Sequence[str], x: np.ndarray) -> np.ndarray:
        """By how much predictions are too long, in logarithms."""
        return np.log(np.array(self.predict(self.constants(free, x)), dtype=float)) - self.target

    def jacobian(self, free: Sequence[str], x: np.ndarray) -> np.ndarray:
        """Slopes of the residuals, with a column for each constant."""
        columns = []
        for index in range(len(free)):
            step = np.zeros(len(free))
            step[index] = _DIFFERENCE
            # A constant at its bound has a slope on one side only.
            columns.append((self.residuals(free, x + step) - self.residuals(free, x - step)) / (2 * _DIFFERENCE))
        return np.stack(columns, 1) if columns else np.zeros((len(self.measured), 0))

    def cost(self, free: Sequence[str], x: np.ndarray) -> float:
        spread = np.array([_spread(name) for name in free])
        return float(((self.residuals(free, x) * self.weight) ** 2).sum() + ((x / spread) ** 2).sum())

    def solve(self, free: Sequence[str]) -> np.ndarray:
        """The best of what is found from the start and from launches that take longer or shorter."""
        starts = [np.zeros(len(free))]
        for name in _OF_LAUNCHES:
            if name in free:
                aside = np.zeros(len(free))
                aside[free.index(name)] = _spread(name)
                starts += [aside, -aside]
        return min((self._descend(free, start) for start in starts), key=lambda x: self.cost(free, x))

    def _descend(self, free: Sequence[str], start: np.ndarray) -> np.ndarray:
        low, high = (
            np.array([math.log(bounds_of(name)[side] / getattr(self.start, name)) for name in free]) for side in (0, 1)
        )
        prior = np.diag([_spread(name) ** -2 for name in free])
        x = np.clip(start, low, high)
        cost = self.cost(free, x)
        for _ in range(_STEPS if free else 0):
            weighted = self.jacobian(free, x) * self.weight[:, None]
            slope = weighted.T @ (self.residuals(free, x) * self.weight) + prior @ x
            held = ((x <= low) & (slope > 0)) | ((x >= high) & (slope < 0))
            step = np.zeros(len(free))
            if not held.all():
                curve = (weighted.T @ weighted + prior)[np.ix_(~held, ~held)]
                step[~held] = -np.linalg.solve(curve, slope[~held])
            better = self._along(free, x, step, cost, (low, high))
            if better is None:
                break
            x, cost = better
        return x

    def _along(
        self, free: Sequence[str], x: np.ndarray, step: np.ndarray, cost: float, bounds: tuple[np.ndarray, np.ndarray]
    ) -> tuple[np.ndarray, float] | None:
        """The first point of ever shorter steps that is better; none if no step helps."""
        for halving in range(_HALVINGS):
            point = np.clip(x + step / 2**halving, *bounds)
            there = self.cost(free, point)
            if there < cost - 1e-9:
                return point, there
        return None

    def gains(self, free: Sequence[str], jacobian: np.ndarray) -> dict[str, float]:
        """Part of each constant's variance that the measurements take away."""
        if not free:
            return {}
        weighted = jacobian * self.weight[:, None]
        prior = np.diag([_spread(name) ** -2 for name in free])
        left = np.diag(np.linalg.inv(weighted.T @ weighted + prior))
        return {name: float(1 - left[i] / _spread(name) ** 2) for i, name in enumerate(free)}

    def reason(self, name: str, free: Sequence[str], jacobian: np.ndarray) -> str:
        """Why measurements say little about a constant."""
        column = np.abs(jacobian[:, free.index(name)])
        most = int(column.argmax())
        if column[most] < 1e-6:
            return "nothing that was measured depends on it"
        if column[most] < _SMALLEST_SHARE:
            return f"at most {column[most]:.1%} of {self.measured[most].name} depends on it"
        weighted = jacobian * self.weight[:, None]
        alike = np.abs(weighted.T @ weighted[:, free.index(name)]) * [_spread(other) for other in free]
        alike[free.index(name)] = 0
        other = free[int(alike.argmax())]
        if alike.max() == 0:
            return f"{self.measured[most].name} is too short or too noisy to tell"
        return f"cannot be told apart from {other}: runs of other sizes or lengths would tell"


def _spread(name: str) -> float:
    return _SPREADS.get(name, _SPREAD)
