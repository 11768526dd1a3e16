"""Memory and time of a run on its devices, as lines and refusals of its plan.

Owns: when they are shown, and what is said where a device does not hold its roles. Refuses to know: formulas of bytes and
seconds. Always holds: time is said to be an estimate, with what it takes for granted; a device that holds more than it has is
refused.

Codes: M007 a device that holds more than it has, M008 one that is likely too small, M010 a cache in which the longest sample
has no room.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

from meshloom.config.problems import Problem
from meshloom.config.settings import SftSettings, TrainSettings
from meshloom.plan.amounts import format_bytes
from meshloom.plan.checks import Findings
from meshloom.plan.critic_checks import critic_numbers
from meshloom.plan.device_kind import KIND, device_of, given_constants
from meshloom.plan.faults import shortened
from meshloom.plan.fitting import GIB, Case, Look, changes_that_fit, where_else
from meshloom.plan.forecast import Forecast, Group
from meshloom.plan.layout import Layout
from meshloom.plan.ledger import DERIVED, LedgerLine, most_computed_tokens
from meshloom.plan.memory import CHECKPOINT, compute_bytes, on_gpu, trainable_parameters
from meshloom.plan.memory_lines import checkpoint_bytes_each
from meshloom.plan.meshes import Divisible
from meshloom.plan.model_folder import ModelFolder
from meshloom.plan.parameters import count_parameters, is_counted
from meshloom.plan.placement import Role, devices_of_machine, roles_of
from meshloom.plan.recompute import Recompute
from meshloom.plan.residency import Phase
from meshloom.plan.reward_time import score_assumptions
from meshloom.plan.stays import stays
from meshloom.plan.waiting import waiting_lines

_NAMED = 4
"""Stretches of devices that a title names."""


class _Lack(IntEnum):
    """How far devices do not hold their roles."""

    NOTHING = 0
    MARGIN = 1
    ALL = 2


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What a plan says of a run's devices.

    Args:
        recompute: what recompute comes to over these devices.
        memory: lines of each group of devices.
        time: lines of the step, and assumptions.
        tight: whether a device holds more than it has, or is likely too small.
        groups: devices by what they hold.
        forecast: of a step; none where the devices are not known, or do not hold the run.
    """

    recompute: Recompute
    memory: tuple[LedgerLine, ...]
    time: tuple[LedgerLine, ...]
    tight: bool
    groups: tuple[Group, ...] = ()
    forecast: Forecast | None = None


def look_ahead(
    found: Findings, settings: TrainSettings, layout: Layout, folder: ModelFolder, device_memory: int | None
) -> Outlook | None:
    """Memory and time of a run that is laid out, and refusals where it does not fit; none where nothing is known of them:
    the run is on one device of which neither kind nor memory is given, holds everything in every phase, and has no reward
    model.

    Args:
        found: takes refusals and warnings.
        settings: of the run, with what its device map and the kind of its devices say.
        layout: of its roles.
        folder: its model.
        device_memory: bytes of a GPU; none if that is not known.

    Raises:
        UnknownFamily: if the model's parameters cannot be counted by its config.json.
    """
    by_phase = any(stay.moves for stay in stays(settings, layout)) or layout.role(Role.REWARD) is not None
    unknown = device_of(settings) is None and layout.topology.num_devices == 1 and not by_phase
    if unknown and not is_counted(folder.config):
        return None
    case = case_of(settings, folder, device_memory)
    look = case.look({})
    lacks = _check_memory(found, look)
    if unknown and case.memory is None:
        return None
    held = (line for group in look.groups for line in _memory_lines(look, group))
    return Outlook(
        recompute=_recompute(look),
        memory=(*_common_lines(look), *held),
        time=() if unknown else tuple(_time_lines(look, fits=lacks is not _Lack.ALL)),
        tight=lacks is not _Lack.NOTHING,
        groups=look.groups,
        forecast=None if lacks is _Lack.ALL else look.forecast,
    )


def case_of(settings: TrainSettings, folder: ModelFolder, device_memory: int | None) -> Case:
    """A run, to be forecast.

    Args:
        settings: of the run, with what its device map and the kind of its devices say.
        folder: its model.
        device_memory: bytes of a GPU; none if that is not known.

    Raises:
        UnknownFamily: if the model's parameters cannot be counted by its config.json.
    """
    return Case(
        settings=settings,
        model=count_parameters(folder.config),
        divisible=Divisible.of(folder.text_config),
        adapters=None if settings.model.lora is None else trainable_parameters(settings, folder),
        memory=device_memory if on_gpu(settings.device) else None,
        device=device_of(settings),
        machine=devices_of_machine(),
        constants=given_constants(settings).constants,
        critic=critic_numbers(settings),
    )


def is_incomplete(settings: TrainSettings, layout: Layout) -> bool:
    """Whether a role could not be laid out."""
    return any(layout.role(role) is None for role in roles_of(settings))


def nothing_counted() -> LedgerLine:
    """In place of a memory ledger where a role could not be laid out."""
    formula = "counted when all roles can be laid out"
    return LedgerLine(section="memory", name="basis", value=None, formula=formula, source=DERIVED)


def _recompute(look: Look) -> Recompute:
    given = look.settings.model.gradient_checkpointing
    if given != "auto":
        return Recompute(on=given, is_open=False, formula="each layer, in the backward pass, as given")
    if look.case.memory is None:
        formula = "auto: follows from the devices' memory (device_memory_bytes, cluster.device)"
        return Recompute(on=False, is_open=True, formula=formula)
    words = "does not fit" if look.recompute else "fits"
    formula = f"auto: without it, an update {words} in the {look.case.memory / GIB:,.1f} GiB of a device"
    return Recompute(on=look.recompute, is_open=False, formula=formula)


def _names(look: Look, group: Group) -> str:
    """The devices of a group, in short."""
    entries = look.layout.topology.entries(group.devices)
    return ", ".join(entries[:_NAMED]) + (", …" if len(entries) > _NAMED else "")


def _common_lines(look: Look) -> Iterator[LedgerLine]:
    """Numbers that the formulas of all groups begin with, where they are the same for all roles."""
    tokens = look.case.tokens_at_once(look)
    formula = "counted by config.json"
    count = look.case.model.total
    yield LedgerLine(section="memory", name="parameters", value=count, formula=formula, source="model.path")
    critic = None
    if look.layout.role(Role.CRITIC) is not None:
        critic = (look.case.critic or look.case.model).with_scalar_head()
        path = "model.path" if look.settings.critic.model is None else "critic.model"
        formula += ", with a head of one output"
        yield LedgerLine(section="memory", name="critic's parameters", value=critic.total, formula=formula, source=path)
    if len(tokens) == 1:
        formula = "min(batch.tokens_per_microbatch, longest samples of an update); of each sequence's devices together"
        bound = look.settings.batch.tokens_per_microbatch
        if most_computed_tokens(look.settings, bound) < bound:
            formula += "; in whole groups of equal responses, each prompt once"
        origin = look.settings.provenance.of("batch.tokens_per_microbatch")
        value = next(iter(tokens))
        yield LedgerLine(
            section="memory", name="tokens at once", value=value, formula=formula, source=origin, unit="tokens"
        )
    if (adapters := look.case.adapters) is not None:
        formula = "Σ rank × (inputs + outputs) over the layers with adapters"
        yield LedgerLine(
            section="memory", name="trained parameters", value=adapters, formula=formula, source="model.path"
        )
    each = checkpoint_bytes_each(compute_bytes(look.settings.model.dtype, look.settings.device))
    count, of = (look.case.model.total, "parameters") if adapters is None else (adapters, "trained parameters")
    if critic is not None:
        count, of = count + critic.total, f"({of} + critic's parameters)"
    yield _bytes("memory", CHECKPOINT, count * each, f"{of} × {each}, on the disk")


def _memory_lines(look: Look, group: Group) -> Iterator[LedgerLine]:
    ledger = group.ledger
    section = f"memory of each of {_names(look, group)} ({', '.join(group.roles)})"
    for line in ledger.lines():
        yield replace(line, section=section)
    phase, count = ledger.peak
    yield _bytes(section, "peak", count, f"in {phase}, the phase that holds most")
    if ledger.memory_bytes is not None:
        yield _bytes(section, "memory of a device", ledger.memory_bytes, "device_memory_bytes", _origin(look))
    for place, count in where_else(group):
        yield _bytes(
            section,
            f"kept on the {place}",
            count,
            "for this device: parts of models while they are not needed, and samples of a step",
        )


def _origin(look: Look) -> str:
    """Where the memory of a device is known from."""
    given = look.settings.device_memory_bytes is not None
    return look.settings.provenance.of("device_memory_bytes") if given else "free on this GPU"


def _where(look: Look, group: Group) -> str:
    return f"on each of {_names(look, group)}: " if look.layout.topology.num_devices > 1 else ""


def _bytes(section: str, name: str, value: int, formula: str, source: str = DERIVED) -> LedgerLine:
    return LedgerLine(section=section, name=name, value=value, formula=formula, source=source, unit="bytes")


def time_basis(settings: TrainSettings | SftSettings, *, fits: bool, several: bool) -> LedgerLine:
    """What seconds are estimated from, or why they are not.

    Args:
        settings: of the run.
        fits: whether its devices hold it.
        several: whether there are several.
    """
    if not fits:
        formula = "nothing is estimated for a run that its devices do not hold"
        return LedgerLine(section="time", name="basis", value=None, formula=formula, source=DERIVED)
    if device_of(settings) is None:
        formula = f"needs the kind of the devices: {KIND} or --device-kind, such as h200"
        return LedgerLine(section="time", name="basis", value=None, formula=formula, source=DERIVED)
    file = settings.cluster.constants
    whose = "measured on one H200" if file is None else f"of {file}"
    formula = f"an estimate from constants {whose}, as if every sample were the longest"
    if several:
        formula += "; what goes over several devices rests on assumptions that are not measured"
    return LedgerLine(section="time", name="basis", value="estimate", formula=formula, source=DERIVED)


def _time_lines(look: Look, *, fits: bool) -> Iterator[LedgerLine]:
    yield time_basis(look.settings, fits=fits, several=look.layout.topology.num_devices > 1)
    if not fits or look.forecast is None or look.cluster is None:
        return
    given = given_constants(look.settings)
    yield from look.forecast.lines(look.cluster, given.constants, given.origins)
    yield from waiting_lines(look.settings, look.layout, look.forecast, look.forecast_of)
    yield from score_assumptions(look.settings, look.layout)


def _check_memory(found: Findings, look: Look) -> _Lack:
    """Refuse groups of devices that hold more than they have, and a cache without room for the longest sample; warn of
    devices without room for what comes on top."""
    lacks = _Lack.NOTHING
    for group in look.groups:
        if group.roles not in look.lacking():
            continue
        lack = _memory_lack(look, group) or _cache_lack(look)
        suggestions = changes_that_fit(look, group)
        fixes = [f"{shortened(' '.join(each.change))} ({each.price})" for each in suggestions]
        fix = ", or ".join(fixes) or "no change of microbatch, recompute, sharding, offload or devices is enough"
        lack = replace(lack, fix=fix, suggestions=tuple(each.change for each in suggestions))
        refused = lack.code != "M008"
        lacks = _Lack.ALL if refused else max(lacks, _Lack.MARGIN)
        (found.problems if refused else found.warnings).append(lack)
    return lacks


def _memory_lack(look: Look, group: Group) -> Problem | None:
    """What a group of devices lacks in its fullest phase; none if it has enough, or if the engine's cache has too little."""
    ledger, has = group.ledger, look.case.memory
    phase = max(Phase, key=ledger.needed)
    held = ledger.held(phase)
    if has is None or ledger.needed(phase) <= has or (held <= has and look.short_cache(group)):
        return None
    if held > has:
        what = f"{_busiest(group, phase)}: {phase} holds {held / GIB:,.1f} GiB on a device of {has / GIB:,.1f} GiB"
    else:
        needed = f"{ledger.needed(phase) / GIB:,.1f} GiB with libraries and fragmentation"
        what = f"{_busiest(group, phase)}: {phase} needs {needed}, a device has {has / GIB:,.1f} GiB"
    return Problem(
        code="M007" if held > has else "M008",
        what=what,
        where=f"device_memory_bytes ({_origin(look)})",
        why=f"{_where(look, group)}{_largest(group, phase)}",
    )


def _cache_lack(look: Look) -> Problem:
    """What the longest sample lacks in the engine's cache."""
    engine, rollout, path = look.engine, look.settings.rollout, "rollout.kv_cache_bytes"
    if engine is None:
        raise AssertionError("a cache has an engine")
    needs, has = engine.longest_sample_bytes, engine.cache_bytes or 0
    if rollout.kv_cache_bytes is None:
        path = "rollout.vllm.gpu_memory_utilization"
    each = needs // engine.slot_tokens
    return Problem(
        code="M010",
        what=f"the longest sample does not fit the key-value cache: it takes {format_bytes(needs)} of {format_bytes(has)}",
        where=f"{path} ({look.settings.provenance.of(path)})",
        why=f"{engine.slot_tokens:,} tokens × {each:,} bytes; the cache: {engine.cache_bound}",
    )


def _busiest(group: Group, phase: Phase) -> str:
    """The role that holds most of what lives in a phase alone; where there is none, that holds most."""
    here = [holding for holding in group.ledger.holdings if phase in holding.phases]
    own = [holding for holding in here if len(holding.phases) == 1] or here
    sums = {holding.role: 0 for holding in own}
    for holding in own:
        sums[holding.role] += holding.bytes
    return max(sums, key=lambda role: sums[role])


def _largest(group: Group, phase: Phase) -> str:
    """What takes most in a phase."""
    here = sorted((held for held in group.ledger.holdings if phase in held.phases), key=lambda held: -held.bytes)
    return ", ".join(f"{held.role}: {held.name} {held.bytes / GIB:,.1f} GiB" for held in here[:4] if held.bytes)
