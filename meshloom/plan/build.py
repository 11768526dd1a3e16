"""Building the plan of a run.

Owns: putting ledgers and checks together. Refuses to know: how anything is executed. Always holds: nothing is written, no
device is touched, no weight is read; what is wrong is collected, not raised, until ``require`` is called.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshloom.config.errors import UserError
from meshloom.config.problems import Problem, require_none
from meshloom.config.settings import EvalSettings, SftSettings, TrainSettings
from meshloom.plan.algorithm import algorithm_lines
from meshloom.plan.checks import Findings, check_settings
from meshloom.plan.compute import NotPossible, compute_ledger
from meshloom.plan.critic_checks import critic_folder
from meshloom.plan.decoding import engine_line
from meshloom.plan.device_checks import check_devices, lay_out
from meshloom.plan.device_kind import check_device_kind, check_device_memory, with_device_kind
from meshloom.plan.engines import check_engine_settings
from meshloom.plan.generated import generation_lines
from meshloom.plan.group_checks import check_groups
from meshloom.plan.held_out import held_out_lines
from meshloom.plan.inputs import check_inputs
from meshloom.plan.layout import Layout
from meshloom.plan.ledger import (
    CRITIC_UPDATES,
    MICROBATCHES,
    LedgerLine,
    batch_ledger,
    sft_steps,
    train_steps,
)
from meshloom.plan.memory import (
    ModelShape,
    UnknownShape,
    compute_bytes,
    memory_ledger,
    on_gpu,
)
from meshloom.plan.meshes import Divisible
from meshloom.plan.model_checks import check_model
from meshloom.plan.model_folder import ModelFolder, read_model_folder
from meshloom.plan.outlook import Outlook, is_incomplete, look_ahead, nothing_counted
from meshloom.plan.parameters import UnknownFamily
from meshloom.plan.placement import Role, devices_of_machine
from meshloom.plan.recompute import choose_recompute
from meshloom.plan.reference_checks import check_reference, reference_line
from meshloom.plan.room import check_room
from meshloom.plan.sft_devices import lay_out_sft
from meshloom.plan.sft_outlook import check_sft_offload, counts_each_device, look_at_sft
from meshloom.plan.spread import ledger_over_devices
from meshloom.plan.stays import sft_stays, stay_lines, stays


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run, described.

    Args:
        title: what is planned, such as ``train runs/a``.
        lines: the ledgers.
        problems: why the run cannot work; empty if it can.
        warnings: what runs, but is likely not meant.
        steps: steps of the run; none if that needs the number of prompts and it is not known, and for an evaluation.
        recompute: whether layers are recomputed in the backward pass; false while that is open.
        layout: the roles of a reinforcement-learning run on its devices, or of a supervised one over several; none for
            other runs.
        together: overrides that end all problems of devices together, where there are several.
        outlook: memory and time of each group of devices, as records; none where they were not counted.
    """

    title: str
    lines: tuple[LedgerLine, ...]
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    steps: int | None
    recompute: bool = False
    layout: Layout | None = None
    together: tuple[str, ...] = ()
    outlook: Outlook | None = None

    def value(self, name: str) -> int | float | str | None:
        """The value of a line, by its name.

        Raises:
            KeyError: if there is no such line.
        """
        return {line.name: line.value for line in self.lines}[name]

    @property
    def updates(self) -> int | None:
        """Optimizer updates of the run; none where ``steps`` is, or where a step has no whole number of updates."""
        total = None if self.steps is None else self.value("updates of the run")
        return total if isinstance(total, int) else None

    @property
    def critic_updates(self) -> int:
        """Optimizer updates of the critic; 0 where there is none, or where ``updates`` is none."""
        total = next((line.value for line in self.lines if line.name == CRITIC_UPDATES), None)
        return total if isinstance(total, int) else 0

    def require(self) -> None:
        """Do nothing if the run can work.

        Raises:
            UserError: that lists every problem.
        """
        require_none(self.problems, self.title)


def build_plan(
    settings: TrainSettings | SftSettings | EvalSettings, num_prompts: int | None, device_memory: int | None = None
) -> Plan:
    """The plan of a run.

    Args:
        settings: of the run.
        num_prompts: prompts of the training data (rows, in supervised runs; prompts to evaluate, in evaluations), after
            overlong ones are dropped; none if not known yet.
        device_memory: bytes free on the GPU, before the run takes any; none if it was not asked.
    """
    folder, unread = _read_model(settings)
    device_memory = settings.device_memory_bytes or device_memory
    if not isinstance(settings, EvalSettings):
        settings = with_device_kind(settings, device_memory)
        device_memory = settings.device_memory_bytes or device_memory
    laid_out = _lay_out(settings, folder, num_prompts)
    settings, found, outlook = laid_out.settings, laid_out.found, None
    check_engine_settings(found, settings)
    check_device_memory(found, settings)
    critic = _check_roles(found, settings, folder)
    lines = [*check_inputs(found, settings), *_batch_lines(settings, num_prompts, laid_out)]
    recompute = settings.model.gradient_checkpointing is True
    if unread is not None:
        found.refuse("M001", "model.path", unread.what, why=unread.why, fix=unread.fix)
    if folder is not None:
        check_model(found, settings, folder)
        try:
            lines += _compute_lines(found, settings, folder)
            more, recompute, outlook = _memory_and_time(found, settings, laid_out.layout, folder, critic, device_memory)
            lines += more
        except UnknownShape as error:
            found.warn("M002", "model.path", f"the plan has no memory ledger: {error}")
    kind, steps = _kind_and_steps(settings, num_prompts)
    return Plan(
        title=f"{kind} {settings.run_dir}",
        lines=tuple(lines),
        problems=tuple(found.problems),
        warnings=tuple(found.warnings),
        steps=steps,
        recompute=recompute,
        layout=None if kind == "sft" and not laid_out.is_spread else laid_out.layout,
        together=laid_out.together,
        outlook=outlook,
    )


@dataclass(frozen=True, kw_only=True)
class _LaidOut:
    """A run on its devices, and what is wrong so far.

    Args:
        settings: with what the device map says.
        found: what is wrong.
        layout: of the roles; none for an evaluation.
        together: changes that end all faults of devices together.
        lines: the batch over several devices.
    """

    settings: TrainSettings | SftSettings | EvalSettings
    found: Findings
    layout: Layout | None = None
    together: tuple[str, ...] = ()
    lines: tuple[LedgerLine, ...] = ()

    @property
    def is_spread(self) -> bool:
        """Whether the run is on several devices."""
        return self.layout is not None and self.layout.topology.num_devices > 1


def _lay_out(
    settings: TrainSettings | SftSettings | EvalSettings, folder: ModelFolder | None, num_prompts: int | None
) -> _LaidOut:
    if isinstance(settings, EvalSettings):
        return _LaidOut(settings=settings, found=check_settings(settings, num_prompts))
    machine, model = devices_of_machine(), None if folder is None else Divisible.of(folder.text_config)
    if isinstance(settings, SftSettings):
        of_sft = lay_out_sft(settings, model, machine)
        found = check_settings(settings, num_prompts)
        found.problems += of_sft.problems
        check_sft_offload(found, settings)
        check_device_kind(found, settings)
        lines = of_sft.lines if of_sft.layout.topology.num_devices > 1 else ()
        return _LaidOut(settings=settings, found=found, layout=of_sft.layout, lines=lines)
    on_devices = lay_out(settings, model, machine)
    settings, layout = on_devices.settings, on_devices.layout
    found = check_settings(settings, num_prompts)
    together = check_devices(found, on_devices, model, machine, num_prompts)
    check_device_kind(found, settings)
    lines = ledger_over_devices(settings, layout) if layout.topology.num_devices > 1 else ()
    return _LaidOut(settings=settings, found=found, layout=layout, together=together, lines=lines)


def _check_roles(
    found: Findings, settings: TrainSettings | SftSettings | EvalSettings, folder: ModelFolder | None
) -> ModelFolder | None:
    """Look at the groups, the reference and the critic of a run that has them; the critic's folder."""
    if not isinstance(settings, TrainSettings):
        return None
    check_groups(found, settings)
    check_reference(found, settings)
    return critic_folder(found, settings, folder)


def _batch_lines(
    settings: TrainSettings | SftSettings | EvalSettings, num_prompts: int | None, laid_out: _LaidOut
) -> Iterator[LedgerLine]:
    """The algorithm and the batch, from prompts to what one device holds at once."""
    if isinstance(settings, TrainSettings):
        yield from algorithm_lines(settings)
    yield from (line for line in batch_ledger(settings, num_prompts) if not laid_out.lines or line.name != MICROBATCHES)
    if isinstance(settings, SftSettings):
        yield from held_out_lines(settings, sft_steps(settings, num_prompts))
    if isinstance(settings, TrainSettings):
        yield from generation_lines(settings)
        if (reference := reference_line(settings)) is not None:
            yield reference
    yield from laid_out.lines


def _kind_and_steps(
    settings: TrainSettings | SftSettings | EvalSettings, num_prompts: int | None
) -> tuple[str, int | None]:
    """The command of a run, and its steps where they are known."""
    if isinstance(settings, EvalSettings):
        return "eval", None
    if isinstance(settings, SftSettings):
        return "sft", sft_steps(settings, num_prompts)
    return "train", train_steps(settings, num_prompts)


def _memory_and_time(
    found: Findings,
    settings: TrainSettings | SftSettings | EvalSettings,
    layout: Layout | None,
    folder: ModelFolder,
    critic: ModelFolder | None,
    device_memory: int | None,
) -> tuple[list[LedgerLine], bool, Outlook | None]:
    """What the run holds and takes, whether layers are recomputed, and the outlook where there is one. Over several devices,
    and where parts of models leave theirs, the ledgers are those of each; where these cannot be made, those of one device that
    holds everything stand for them."""
    recompute, by_phase = settings.model.gradient_checkpointing is True, False
    moved: list[LedgerLine] = []
    if isinstance(settings, SftSettings) and layout is not None:
        moved, by_phase = list(stay_lines(sft_stays(settings))), counts_each_device(settings, layout)
    if isinstance(settings, TrainSettings) and layout is not None:
        if layout.topology.num_devices > 1 and is_incomplete(settings, layout):
            return [nothing_counted()], recompute, None
        moved = list(stay_lines(stays(settings, layout)))
        scored = layout.role(Role.REWARD) is not None
        by_phase = layout.topology.num_devices > 1 or bool(moved) or scored
    ahead = _look_ahead(found, settings, layout, folder, device_memory)
    several = ahead is not None and by_phase
    lines: list[LedgerLine] = []
    if not isinstance(settings, EvalSettings):
        over = ahead.recompute if ahead is not None and several else None
        chosen = over or choose_recompute(settings, folder, device_memory, critic)
        lines.append(chosen.line(settings.provenance.of("model.gradient_checkpointing")))
        recompute = chosen.on
    if ahead is None or not several:

        def count(changed: TrainSettings | SftSettings | EvalSettings, on: bool) -> tuple[LedgerLine, ...]:
            return memory_ledger(changed, folder, recompute=on, device_memory=device_memory, critic=critic)

        lines += count(settings, recompute)
        if ahead is None or not ahead.tight:
            adapts = bool(folder.linear_layers(("all-linear",)))
            check_room(found, settings, count, recompute=recompute, adapts=adapts)
    else:
        lines += ahead.memory
    lines += moved
    return lines + ([] if ahead is None else list(ahead.time)), recompute, ahead


def _look_ahead(
    found: Findings,
    settings: TrainSettings | SftSettings | EvalSettings,
    layout: Layout | None,
    folder: ModelFolder,
    device_memory: int | None,
) -> Outlook | None:
    """The outlook of a run that was laid out without fault; none for other runs, or where its model cannot be counted."""
    if isinstance(settings, SftSettings) and layout is not None:
        return look_at_sft(found, settings, layout, folder, device_memory)
    if not isinstance(settings, TrainSettings) or layout is None or is_incomplete(settings, layout):
        return None
    try:
        return look_ahead(found, settings, layout, folder, device_memory)
    except UnknownFamily as error:
        found.warn("M002", "model.path", f"the plan has no ledgers of memory and time over its devices: {error}")
        return None


def _read_model(settings: TrainSettings | SftSettings | EvalSettings) -> tuple[ModelFolder | None, UserError | None]:
    try:
        return read_model_folder(Path(settings.model.path), needs_weights=False), None
    except UserError as error:
        return None, error


def _compute_lines(
    found: Findings, settings: TrainSettings | SftSettings | EvalSettings, folder: ModelFolder
) -> tuple[LedgerLine, ...]:
    gpu, narrow = on_gpu(settings.device), compute_bytes(settings.model.dtype, settings.device) == 2
    head_dim = ModelShape.of(folder).head_dim
    engine = () if isinstance(settings, SftSettings) else (engine_line(settings, folder, head_dim, gpu=gpu),)
    try:
        return *engine, *compute_ledger(settings, head_dim, gpu=gpu, narrow=narrow)
    except NotPossible as error:
        what = f"{settings.model.attention} cannot compute this model's attention"
        found.refuse("M006", "model.attention", what, why=str(error), fix="model.attention=auto")
        return engine
