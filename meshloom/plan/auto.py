"""``placement: auto`` and ``--auto``: settings whose placement, cuts and memory budgets a search has chosen.

Owns: what a search is given, and what its outcome is as settings. Refuses to know: how it is searched, how it is shown. Always
holds: what somebody gave is kept; the chosen settings ask for no search any more; nothing is chosen that the plan refuses.

Codes: X001 nothing can be chosen, X002 rates or memory of the devices are not known, X003 the choice is planned only.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from meshloom.config.errors import UserError
from meshloom.config.problems import Problem, require_none
from meshloom.config.provenance import Provenance
from meshloom.config.settings import TrainSettings
from meshloom.plan.arrangement import CACHE_SHARE, RECOMPUTE, TOKENS, Arrangement
from meshloom.plan.candidates import Candidates, Given
from meshloom.plan.carried_out import PLANNED, planned_only
from meshloom.plan.constants import Cluster
from meshloom.plan.device_kind import with_device_kind
from meshloom.plan.device_map import with_device_map
from meshloom.plan.faults import with_values
from meshloom.plan.fitting import GIB, Case
from meshloom.plan.hardware import DEVICES, Device, find_device
from meshloom.plan.memory import on_gpu
from meshloom.plan.model_folder import read_model_folder
from meshloom.plan.outlook import case_of
from meshloom.plan.parameters import UnknownFamily
from meshloom.plan.placement import devices_of_machine, topology_of
from meshloom.plan.ranking import Ranking, rank, refusals
from meshloom.plan.search import Found, search
from meshloom.plan.topology import Topology
from meshloom.plan.weigh import Scales
from meshloom.plan.weighed import Weighed

AUTO = "placement.auto"
_CHOSEN = "chosen by placement: auto"
_ASSUMED = "h100"
_BUDGETS = (TOKENS, RECOMPUTE, CACHE_SHARE)
_OFFLOADS = ("optimizer", "parameters")


def arranged(settings: TrainSettings) -> tuple[TrainSettings, Ranking | None]:
    """Settings that ``train`` carries out: those that a search has chosen, if they ask for one.

    Args:
        settings: of a run that begins now.

    Returns:
        The settings, and the search's outcome; none if there was none.

    Raises:
        UserError: if nothing can be chosen.
    """
    if not settings.placement.auto:
        return settings, None
    ranking = choose(settings, to_run=True)
    require_none(ranking.problems, f"train {settings.run_dir}: {AUTO}")
    if ranking.chosen is None:
        raise AssertionError("a search without problems has chosen")
    return ranking.chosen, ranking


def choose(settings: TrainSettings, device_memory: int | None = None, *, to_run: bool = False) -> Ranking:
    """Search for the arrangement that takes least time.

    Args:
        settings: of the run; what is given in them is kept.
        device_memory: bytes free on the GPU; none if it was not asked.
        to_run: look only at what ``train`` carries out.
    """
    settings, faults = with_device_map(settings)
    settings = with_device_kind(settings, device_memory)
    memory = settings.device_memory_bytes or device_memory
    topology, named = topology_of(settings, devices_of_machine())
    if faults or named:
        return _nothing(settings, "the devices are not known", "their map or their names are refused")
    try:
        case = case_of(settings, read_model_folder(Path(settings.model.path), needs_weights=to_run), memory)
    except (UserError, UnknownFamily) as error:
        return _nothing(settings, "the model is not known", str(error))
    kind = _kind(settings)
    case = replace(case, device=kind.device, memory=_memory(settings, memory, kind))
    return _ranked(settings, case, kind, topology, to_run=to_run)


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """What the devices are taken for, and how that is known."""

    device: Device
    assumed: bool


def _kind(settings: TrainSettings) -> _Kind:
    """What the settings say that the devices are; or the driver of this machine; or the known one whose memory is nearest."""
    name = settings.cluster.device
    if name is not None and (device := find_device(name)) is not None:
        return _Kind(device=device, assumed=False)
    here = settings.device_memory_bytes is None and on_gpu(settings.device)
    if here and (device := _device_of_machine()) is not None:
        return _Kind(device=device, assumed=False)
    memory, usual = settings.device_memory_bytes, find_device(_ASSUMED)
    if usual is None:
        raise AssertionError(f"{_ASSUMED} is in the table of devices")
    if memory is None:
        return _Kind(device=usual, assumed=True)
    nearest = min((usual, *DEVICES), key=lambda device: abs(device.memory_bytes - memory) // GIB)
    return _Kind(device=nearest, assumed=True)


def _device_of_machine() -> Device | None:
    """The kind of this machine's first GPU, by what its driver says without touching it; none if that is not known."""
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        found = re.search(r"^Model:\s*(.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        return None if found is None else find_device(found[1])
    return None


def _memory(settings: TrainSettings, memory: int | None, kind: _Kind) -> int | None:
    if not on_gpu(settings.device):
        return None
    return memory if memory is not None or kind.assumed else kind.device.memory_bytes


def _given(settings: TrainSettings, case: Case) -> Given:
    """What a search keeps. Without memory to go by it leaves budgets as they are."""
    paths = set(Given.of(settings).paths)
    if settings.model.gradient_checkpointing == "auto":
        paths.discard(RECOMPUTE)
    if case.memory is None:
        paths |= {
            *_BUDGETS,
            *(f"offload.{role}.{name}" for role in ("actor", "reference", "critic") for name in _OFFLOADS),
        }
    return Given(frozenset(paths))


def _ranked(settings: TrainSettings, case: Case, kind: _Kind, topology: Topology, *, to_run: bool) -> Ranking:
    given = _given(settings, case)
    candidates = Candidates(settings=settings, topology=topology, model=case.divisible, given=given)
    cluster = Cluster(device=kind.device, devices_per_node=topology.devices_per_node)
    scales = Scales(case, cluster, given)
    allowed = _is_carried_out if to_run else None
    found = search(candidates.families(), scales, allowed=allowed, accepted=_accepted(case))
    reasons = {at: _reasons(weighed) for at, weighed in enumerate(found.best)}
    ranking = Ranking(
        ranked=rank(settings, found, {at: why for at, why in reasons.items() if why}, memory=case.memory),
        refused=refusals(found, candidates.refused),
        kept=tuple(sorted(path for path in Given.of(settings).paths if _is_searched(path))),
        considered=found.considered,
        weighed=found.weighed,
        complete=found.complete,
    )
    if not found.best:
        return replace(ranking, problems=(_none_fits(settings, case, found, topology, to_run=to_run),))
    chosen = _settled(settings, found.best[0])
    return replace(ranking, chosen=chosen, warnings=_warnings(settings, case, kind, ranking))


def _is_carried_out(settings: TrainSettings, arrangement: Arrangement) -> bool:
    return not planned_only(settings, arrangement.layout)


def _reasons(weighed: Weighed) -> tuple[str, ...]:
    return tuple(
        problem.what.removesuffix(PLANNED) for problem in planned_only(weighed.settings, weighed.arrangement.layout)
    )


def _accepted(case: Case) -> Callable[[Weighed], bool]:
    """Whether the plan refuses nothing of a run that it did not refuse before."""
    before = case.look({}).wrong

    def accepted(weighed: Weighed) -> bool:
        after = replace(case, settings=weighed.settings).look({})
        return after.wrong <= before

    return accepted


def _is_searched(path: str) -> bool:
    return path in _BUDGETS or path != AUTO and path.startswith(("placement.", "parallel.", "offload."))


def _settled(settings: TrainSettings, best: Weighed) -> TrainSettings:
    """The chosen settings, which ask for no search any more; values that were chosen say so."""
    change = {**best.arrangement.change(settings), **best.budget.change(settings)}
    given = Given.of(settings)
    change = {path: value for path, value in change.items() if path not in given or path == RECOMPUTE}
    chosen = with_values(best.settings, {AUTO: False}, _CHOSEN)
    origins = {path: it for path, it in settings.provenance.origins.items() if path not in (AUTO, "placement")}
    chosen._provenance = Provenance({**origins, **dict.fromkeys(change, _CHOSEN)})
    return chosen


def _warnings(settings: TrainSettings, case: Case, kind: _Kind, ranking: Ranking) -> tuple[Problem, ...]:
    found: list[Problem] = []
    where = f"{AUTO} ({settings.provenance.of(AUTO)})"
    if kind.assumed or case.memory is None:
        unknown = "rates" if case.memory is not None else "memory" if not kind.assumed else "memory and rates"
        what = f"the {unknown} of the devices are not known: the ranking takes the rates of {kind.device.name}"
        if case.memory is None:
            what += ", and does not ask whether it fits"
        fix = "give --device-kind or cluster.device, such as h200"
        found.append(Problem(code="X002", what=what, where=where, fix=fix))
    if ranking.ranked[0].planned_only:
        first = next((one for one in ranking.ranked if not one.planned_only), None)
        what = f"the choice is planned only: {', '.join(ranking.ranked[0].planned_only)}"
        fix = "" if first is None else f"number {first.place} is carried out: {' '.join(first.change)}"
        why = "train of this version, with placement: auto, chooses among what it carries out"
        found.append(Problem(code="X003", what=what, where=where, why=why, fix=fix))
    return tuple(found)


def _none_fits(settings: TrainSettings, case: Case, found: Found, topology: Topology, *, to_run: bool) -> Problem:
    count = f"{topology.num_devices:,} device{'s' if topology.num_devices > 1 else ''}"
    where = f"{AUTO} ({settings.provenance.of(AUTO)})"
    if found.lacking:
        arrangement, lack = min(found.lacking, key=lambda pair: pair[1].lacking)
        has = "" if case.memory is None else f" of {case.memory / GIB:,.1f} GiB"
        what = f"no placement of this run fits on {count}{has}"
        why = f"the nearest, {arrangement.words()}, recomputed and with all that can wait on the host: {lack.what}"
        fix = "more or larger devices, fewer tokens in prompts and responses, "
        fix += "or a smaller model" if settings.model.lora is not None else "model.lora.rank=16, or a smaller model"
        return Problem(code="X001", what=what, where=where, why=why, fix=fix)
    what = f"no placement of this run on {count} can be chosen"
    why = "train carries out none of them" if to_run else "none is left beside what is given"
    fix = "give fewer devices, or leave out settings of placement and parallel"
    return Problem(code="X001", what=what, where=where, why=why, fix=fix)


def _nothing(settings: TrainSettings, what: str, why: str) -> Ranking:
    where = f"{AUTO} ({settings.provenance.of(AUTO)})"
    return Ranking(problems=(Problem(code="X001", what=f"nothing can be chosen: {what}", where=where, why=why),))
