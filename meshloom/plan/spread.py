"""The batch ledger over devices: what each device, and each replica of the engine, has to do.

Owns: the shares of a batch and their lines, and which batches leave a device without work. Refuses to know: memory, time.
Always holds: a sample is on exactly one replica of a role in each phase; shares add up to the whole,
and differ by at most one where all samples cost alike.

Codes: B010 to B013, and A011 of ``plan.lag``.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import gcd, lcm

from meshloom.config.settings import TrainSettings
from meshloom.plan.faults import Change, Fault
from meshloom.plan.lag import lag_faults
from meshloom.plan.layout import Layout, RoleLayout
from meshloom.plan.ledger import (
    DERIVED,
    LedgerLine,
    fewest_in_full,
    longest_sample_tokens,
    most_microbatches,
    samples_per_update,
)
from meshloom.plan.meshes import AXES, Degrees, Divisible, Pool, near_degrees
from meshloom.plan.pipeline_order import bubble
from meshloom.plan.placement import Role

_NO_PASS = "no such pass is made: a step's only update computes them itself, or the sampler's count"
"""Said of log-prob microbatches of an actor that makes none."""


@dataclass(frozen=True)
class Share:
    """A number of things over a number of takers, as evenly as it goes."""

    total: int
    takers: int

    @property
    def least(self) -> int:
        """What a taker has at least."""
        return self.total // self.takers

    @property
    def most(self) -> int:
        """What a taker has at most."""
        return -(-self.total // self.takers)

    @property
    def value(self) -> int | str:
        """The number, or both."""
        return self.most if self.least == self.most else f"{self.least} or {self.most}"


def ledger_over_devices(settings: TrainSettings, layout: Layout) -> tuple[LedgerLine, ...]:
    """Lines of the batch ledger that follow from where the roles are.

    Args:
        settings: of the run.
        layout: where its roles are; roles that could not be laid out have no lines.
    """
    lines: list[LedgerLine] = []
    for found in layout.roles:
        if found.role == Role.ROLLOUT:
            lines += _rollout_lines(settings, found)
        elif found.role != Role.REWARD:
            lines += model_lines(settings, found)
    return tuple(lines)


def _line(name: str, value: int | str, formula: str, unit: str, source: str = DERIVED) -> LedgerLine:
    return LedgerLine(section="batch over devices", name=name, value=value, formula=formula, source=source, unit=unit)


def _rollout_lines(settings: TrainSettings, rollout: RoleLayout) -> list[LedgerLine]:
    batch, replicas, origin = settings.batch, rollout.replicas, settings.provenance
    prompts = Share(batch.prompts_per_step, replicas)
    each = batch.samples_per_prompt
    samples = (
        prompts.most * each if prompts.least == prompts.most else f"{prompts.least * each} or {prompts.most * each}"
    )
    return [
        _line("rollout devices", len(rollout.devices), "placement.rollout", "devices", origin.of("placement.rollout")),
        _line(
            "rollout replicas",
            replicas,
            "rollout devices ÷ parallel.rollout.tensor",
            "replicas",
            origin.of("parallel.rollout.tensor"),
        ),
        _line("prompts per rollout replica", prompts.value, "prompts per step ÷ rollout replicas", "prompts"),
        _line("samples per rollout replica", samples, "prompts per rollout replica × samples per prompt", "samples"),
    ]


def model_lines(settings: TrainSettings, found: RoleLayout) -> list[LedgerLine]:
    """Samples and microbatches of a model that computes log-probs and, if it is trained, updates."""
    name, replicas = str(found.role), found.replicas
    cut, origin = " × ".join(f"parallel.{name}.{cut}" for cut in AXES), settings.provenance
    cuts = list(dict.fromkeys(origin.of(f"parallel.{name}.{cut}") for cut in AXES))
    given = ", ".join(place for place in cuts if place != "default") or "default"
    prefix = "" if found.role == Role.ACTOR else f"{name} "
    lines = [
        _line(f"{name} devices", len(found.devices), f"placement.{name}", "devices", origin.of(f"placement.{name}")),
        _line(f"{name} replicas", replicas, f"{name} devices ÷ ({cut})", "replicas", given),
    ]
    each = "device" if replicas == len(found.devices) else "replica"
    if found.role != Role.REFERENCE:
        share = Share(samples_per_update(settings), replicas)
        shared = _line(
            f"{prefix}samples per {each} per update",
            share.value,
            f"samples per update ÷ {name} replicas",
            "samples",
        )
        many = _microbatches(settings, found, share, shared.name, f"{prefix}update microbatches", each)
        lines += [shared, *many, *_bubble(settings, found, prefix, many[0])]
    step = Share(settings.batch.prompts_per_step * settings.batch.samples_per_prompt, replicas)
    shared = _line(f"{prefix}samples per {each} per step", step.value, f"samples per step ÷ {name} replicas", "samples")
    asked = f"{prefix}{'value' if found.role == Role.CRITIC else 'log-prob'} microbatches"
    many = _microbatches(settings, found, step, shared.name, asked, each)
    if found.role == Role.ACTOR and "log-prob" not in found.phases:
        many = [replace(line, formula=f"{_NO_PASS}, else {line.formula}") for line in many]
    return [*lines, shared, *many]


def _microbatches(
    settings: TrainSettings, found: RoleLayout, share: Share, of: str, name: str, each: str
) -> list[LedgerLine]:
    """Microbatches of a replica and of all where every sample is the longest and replicas have as many of them, and the most
    however long they are: ranks get samples by what these cost, so one may have more of shorter ones. The devices of a split
    sequence hold ``tokens_per_microbatch`` each."""
    batch, own = settings.batch, settings.critic.tokens_per_microbatch if found.role == Role.CRITIC else None
    tokens = (own or batch.tokens_per_microbatch) * found.mesh.size("sp")
    longest = longest_sample_tokens(settings)

    def most(samples: int) -> int:
        return most_microbatches(samples, longest, tokens, batch.samples_per_microbatch, batch.samples_per_prompt)

    larger = share.total % share.takers
    total = larger * most(share.most) + (share.takers - larger) * most(share.least)
    fewest = fewest_in_full(longest, tokens, batch.samples_per_microbatch, batch.samples_per_prompt)
    bound = most(share.total) if share.takers == 1 else (share.total + share.takers * (fewest - 1)) // fewest
    summed = f"the sum over {found.role} replicas" if larger else f"{name} per {each} × {found.role} replicas"
    filled = "all as long as the longest" + ("" if share.takers == 1 else ", as many on each replica")
    return [
        _line(f"{name} per {each}", most(share.most), f"{_packed(settings, of, tokens // longest)}; {filled}", ""),
        _line(f"{name} in all", total, f"{summed}; at most {bound} whatever the lengths", ""),
    ]


def _packed(settings: TrainSettings, of: str, fitting: int) -> str:
    """How ``most_microbatches`` comes to its number."""
    batch, fitting = settings.batch, max(1, fitting)
    group = batch.samples_per_prompt
    if batch.samples_per_microbatch is not None or group == 1:
        return f"⌈{of} ÷ {min(fitting, batch.samples_per_microbatch or fitting)}⌉, the longest samples that fit one"
    whole, left = divmod(group, fitting)
    rests = f"⌈prompts ÷ {fitting // left}⌉ for the {left} left of each" if left else ""
    each = f"{whole} for each prompt, as {fitting} of its samples fit one" if whole else ""
    if each and rests:
        return f"{each}, and {rests}"
    return each or f"⌈{of} ÷ {fitting // group * group}⌉, the longest samples that fit one, those of a prompt together"


def _bubble(settings: TrainSettings, found: RoleLayout, prefix: str, microbatches: LedgerLine) -> Iterator[LedgerLine]:
    """How long devices of a pipeline stand empty; the less the more microbatches there are, so with the most of them."""
    devices, stages, count = found.mesh.size("pp"), found.stages_per_device, int(microbatches.value)
    if devices == 1:
        return
    share = bubble(devices=devices, stages_per_device=stages, microbatches=count)
    missing = (stages - 1) * max(0, devices - count)
    stands = f"{devices} pipeline devices − 1" + (f" + {missing} places without a microbatch" if missing else "")
    formula = (
        f"at least, of the time in which they compute: ({stands}) ÷ ({microbatches.name} × {stages} stages of each)"
    )
    origin = settings.provenance.of(f"parallel.{found.role}.stages_per_device")
    yield _line(f"{prefix}pipeline stands empty", f"{100 * share:.3g}%", formula, "", origin)


def spread_faults(settings: TrainSettings, layout: Layout, model: Divisible | None) -> Iterator[Fault]:
    """Batches that leave a device without work, and samples that would have to be older than devices in turn can make them.

    Args:
        settings: of the run.
        layout: where its roles are.
        model: of the run, for cuts that give fewer replicas; none if it is not known.
    """
    batch = settings.batch
    samples_per_step = batch.prompts_per_step * batch.samples_per_prompt
    yield from lag_faults(settings, layout)
    for found in layout.roles:
        if found.role == Role.ROLLOUT:
            yield from _rollout_faults(settings, layout, found, model)
            continue
        trained = found.role in (Role.ACTOR, Role.CRITIC)
        samples = samples_per_update(settings) if trained else samples_per_step
        if samples >= found.replicas:
            continue
        of = "an update" if trained else "a step"
        code, path = ("B010", _update_path(settings)) if trained else ("B012", "batch.prompts_per_step")
        over = f"{found.replicas} {'devices' if found.replicas == len(found.devices) else 'replicas'}"
        yield Fault(
            code=code,
            path=path,
            subject=str(found.role),
            what=f"{samples} samples {of} over {over} leaves some with none",
            why=f"the {found.role} has {len(found.devices):,} devices, as {found.mesh}; each replica needs a sample",
            changes=_more_work(settings, layout, found, model),
        )


def _update_path(settings: TrainSettings) -> str:
    return "batch.prompts_per_step" if settings.batch.prompts_per_update is None else "batch.prompts_per_update"


def _more_work(
    settings: TrainSettings, layout: Layout, found: RoleLayout, model: Divisible | None
) -> Callable[[], Iterator[Change]]:
    batch, replicas = settings.batch, found.replicas
    trained = found.role in (Role.ACTOR, Role.CRITIC)

    def changes() -> Iterator[Change]:
        prompts = -(-replicas // batch.samples_per_prompt)
        update = batch.prompts_per_update if trained else None
        step = batch.prompts_per_step
        if update is None:
            multiple = batch.prompts_per_update or 1
            yield {"batch.prompts_per_step": -(-prompts // multiple) * multiple}
        else:
            larger = next((size for size in range(prompts, step + 1) if step % size == 0), None)
            yield (
                {"batch.prompts_per_update": larger}
                if larger
                else {
                    "batch.prompts_per_update": prompts,
                    "batch.prompts_per_step": -(-step // prompts) * prompts,
                }
            )
        yield {"batch.samples_per_prompt": -(-replicas // (update or step))}
        samples = (update or step) * batch.samples_per_prompt
        yield from cuts_of(settings, layout, found, model, samples)

    return changes


def cuts_of(
    settings: TrainSettings, layout: Layout, found: RoleLayout, model: Divisible | None, most: int
) -> Iterable[Change]:
    """Changes of a role's cuts that leave at most so many replicas, nearest first."""
    pool = Pool.of(found.devices, layout.topology)
    if found.role == Role.REWARD:
        return
    given = degrees_of(settings, found.role)
    near = near_degrees(pool, given, model, trained=found.role != Role.ROLLOUT)
    for cut in (cut for cut in near if pool.world // cut.model_parallel <= most):
        yield cut_change(found.role, given, cut)


def degrees_of(settings: TrainSettings, role: Role) -> Degrees:
    """How the settings cut a role's model."""
    parallel = settings.parallel
    if role == Role.ROLLOUT:
        return Degrees(tensor=parallel.rollout.tensor)
    group = {Role.ACTOR: parallel.actor, Role.REFERENCE: parallel.reference, Role.CRITIC: parallel.critic}.get(role)
    if group is None:
        return Degrees()
    return Degrees(
        fsdp_size=group.fsdp_size,
        tensor=group.tensor,
        pipeline=group.pipeline,
        stages_per_device=group.stages_per_device,
        sequence=group.sequence,
    )


def cut_change(role: Role, given: Degrees, cut: Degrees) -> Change:
    """The change from one cut of a role to another."""
    names = ("tensor", "pipeline", "stages_per_device", "sequence", "fsdp_size")
    pairs = {name: (getattr(given, name), getattr(cut, name)) for name in names}
    return {f"parallel.{role}.{name}": new for name, (old, new) in pairs.items() if old != new}


def _rollout_faults(
    settings: TrainSettings, layout: Layout, found: RoleLayout, model: Divisible | None
) -> Iterator[Fault]:
    prompts, replicas = settings.batch.prompts_per_step, found.replicas
    if prompts >= replicas:
        return

    def changes() -> Iterator[Change]:
        multiple = settings.batch.prompts_per_update or 1
        yield {"batch.prompts_per_step": -(-replicas // multiple) * multiple}
        yield from cuts_of(settings, layout, found, model, prompts)

    yield Fault(
        code="B011",
        path="batch.prompts_per_step",
        what=f"{prompts} prompts a step over {replicas} rollout replicas leaves some with none",
        why=f"the rollout has {len(found.devices):,} devices, as {found.mesh}; a prompt's samples stay on one replica",
        changes=changes,
    )


def uneven(settings: TrainSettings, layout: Layout) -> str:
    """What of a batch does not divide; empty if all does."""
    samples, prompts = samples_per_update(settings), settings.batch.prompts_per_step
    parts: list[str] = []
    for found in layout.roles:
        if found.role == Role.ROLLOUT and prompts % found.replicas:
            parts.append(f"{prompts} prompts a step over {found.replicas} rollout replicas")
        elif found.role in (Role.ACTOR, Role.CRITIC) and samples % found.replicas:
            parts.append(f"{samples} samples an update over {found.replicas} {found.role} replicas")
    return " and ".join(parts)


def even_batches(settings: TrainSettings, layout: Layout) -> list[Change]:
    """The nearest batches below and above that divide over all devices."""
    batch, each = settings.batch, settings.batch.samples_per_prompt
    of_update, of_step = 1, 1
    for found in layout.roles:
        if found.role == Role.ROLLOUT:
            of_step = lcm(of_step, found.replicas)
        elif found.role in (Role.ACTOR, Role.CRITIC):
            of_update = lcm(of_update, found.replicas // gcd(found.replicas, each))
    if batch.prompts_per_update is None:
        return [{"batch.prompts_per_step": size} for size in _around(batch.prompts_per_step, lcm(of_update, of_step))]
    changes: list[Change] = []
    for update in _around(batch.prompts_per_update, of_update):
        step = min(
            _around(batch.prompts_per_step, lcm(update, of_step)), key=lambda size: abs(size - batch.prompts_per_step)
        )
        pair = {
            "batch.prompts_per_update": (batch.prompts_per_update, update),
            "batch.prompts_per_step": (batch.prompts_per_step, step),
        }
        changes.append({path: new for path, (old, new) in pair.items() if old != new})
    return changes


def _around(size: int, multiple: int) -> list[int]:
    """The nearest multiples at or below, and above."""
    below = size // multiple * multiple
    return [near for near in (below, below if below == size else below + multiple) if near][: 1 if below == size else 2]
