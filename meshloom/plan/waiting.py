"""Which role waits for which, and what a lag would gain, as lines of the time ledger.

Owns: these lines. Refuses to know: how long a phase takes, when it is (``plan.schedule``). Always holds: devices wait while
none of their roles works; a step with a lag is forecast as a run with that lag, whose trainer computes old log-probs too.
"""

from collections.abc import Callable, Iterator

from meshloom.config.settings import TrainSettings
from meshloom.plan.faults import with_values
from meshloom.plan.forecast import Forecast
from meshloom.plan.lag import LAG, generates_apart, most_updates, steps_ahead
from meshloom.plan.layout import Layout
from meshloom.plan.ledger import DERIVED, LedgerLine
from meshloom.plan.placement import Role
from meshloom.plan.residency import Phase
from meshloom.plan.schedule import Schedule, Span, schedule

_MOST_NAMES = 3
_MOMENT_S = 1e-6
_TOGETHER = (
    "needs devices that do nothing but generate; meshloom simulate compares placements that let rollouts run ahead"
)


def waiting_lines(
    settings: TrainSettings, layout: Layout, forecast: Forecast, again: Callable[[TrainSettings], Forecast | None]
) -> Iterator[LedgerLine]:
    """Lines about waiting; none on one device.

    Args:
        settings: of the run.
        layout: where its roles are.
        forecast: of the run.
        again: forecasts the run with other settings on the same devices.
    """
    if layout.topology.num_devices == 1:
        return
    step = schedule(settings, layout, forecast)
    for shared in layout.shared:
        if shared.roles:
            yield _wait(step, tuple(map(str, shared.roles)), forecast.step_s)
    yield from _lags(settings, layout, forecast, again)


def _wait(step: Schedule, roles: tuple[str, ...], step_s: float) -> LedgerLine:
    """Seconds in which none of the roles that share devices has anything to do, and for whom."""
    mine = [span for span in step.spans if _works_in(roles, span)]
    others = [span for span in step.spans if span not in mine]
    seconds, at = 0.0, 0.0
    shares: dict[str, float] = {}
    for start, stop in [*sorted((span.start, span.stop) for span in mine), (step.end, step.end)]:
        if start > at:
            seconds += start - at
            for span in others:
                name = f"{span.role}: {span.phase}"
                shares[name] = shares.get(name, 0.0) + max(0.0, min(span.stop, start) - max(span.start, at))
        at = max(at, stop)
    waited_for = [name for name in sorted(shares, key=lambda name: -shares[name]) if shares[name] > _MOMENT_S]
    whom = ", ".join(waited_for[:_MOST_NAMES]) + (", …" if len(waited_for) > _MOST_NAMES else "")
    formula = f"{seconds / step_s:.0%} of the step, for {whom}" if whom else "its devices always have something to do"
    if len(roles) > 1:
        formula += f"; {' and '.join(roles)} take turns on the same devices"
    return _line(f"{', '.join(roles)}: waits", seconds, formula)


def _works_in(roles: tuple[str, ...], span: Span) -> bool:
    """Whether one of some roles works in a span: offload is everybody's, and the actor sends the weights that move."""
    return span.role in roles or span.phase is None or (span.phase is Phase.SYNC and Role.ACTOR in roles)


def _lags(
    settings: TrainSettings, layout: Layout, forecast: Forecast, again: Callable[[TrainSettings], Forecast | None]
) -> Iterator[LedgerLine]:
    """The step with each lag of up to two steps."""
    if not generates_apart(layout):
        yield LedgerLine(
            section="time", name="step with a lag", value=None, formula=_TOGETHER, source=DERIVED, unit="s"
        )
        return
    given, updates = steps_ahead(settings), most_updates(settings.batch)
    for ahead in (0, 1, 2):
        if ahead == given:
            continue
        found = again(with_values(settings, {LAG: ahead * updates}))
        if found is not None:
            yield _line(_name(ahead, updates), found.step_s, _gain(ahead, given, found.step_s, forecast.step_s))


def _name(ahead: int, updates: int) -> str:
    versions = ahead * updates
    return "step without a lag" if not ahead else f"step with a lag of {versions} version{'s' if versions > 1 else ''}"


def _gain(ahead: int, given: int, seconds: float, now: float) -> str:
    more = f"{LAG}: {abs(now - seconds):.2f} s {'less' if seconds <= now else 'more'}"
    if ahead and not given:
        more += "; generation and training at the same time, the trainer computes log-probs of its own first"
    if ahead == 2:
        more += "; gains more than a lag of one step only where lengths differ: meshloom simulate"
    return more


def _line(name: str, value: float, formula: str) -> LedgerLine:
    return LedgerLine(section="time", name=name, value=round(value, 6), formula=formula, source=DERIVED, unit="s")
