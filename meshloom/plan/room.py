"""Whether one device, or this machine, has room for what its ledger says, and changes that make room.

Owns: these warnings. Refuses to know: how bytes are counted (the caller's). Always holds: a change that is named was made and
counted again, and its size is the largest that is enough; a cache that is not given takes what a GPU has left.

Codes: M005 a phase that holds more than there is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from meshloom.config.model_settings import LoraSettings
from meshloom.config.settings import EvalSettings, SftSettings, TrainSettings
from meshloom.plan.faults import Change, with_values
from meshloom.plan.findings import Findings
from meshloom.plan.ledger import LedgerLine, longest_sample_tokens, longest_sequence_tokens
from meshloom.plan.memory import GPU, MACHINE
from meshloom.plan.memory_lines import GENERATING, UPDATING
from meshloom.plan.savings import Step, microbatch_step

Settings = TrainSettings | SftSettings | EvalSettings
Values = Mapping[str, int | float | str | None]
Count = Callable[[Settings, bool], Sequence[LedgerLine]]
"""The ledger of a run, whether or not its layers are recomputed."""

_GIB, _MIB = 2**30, 2**20
_CACHE, _TOKEN = "key-value cache", "cache per token"


def check_room(found: Findings, settings: Settings, count: Count, *, recompute: bool, adapts: bool) -> None:
    """Warn of phases that hold more than there is.

    Args:
        found: takes the warnings.
        settings: of the run.
        count: counts a run.
        recompute: whether layers are recomputed.
        adapts: whether the model has layers that adapters can be on.
    """
    values = _values(count(settings, recompute))
    has, owner = values.get(MACHINE, values.get(GPU)), "this machine has" if MACHINE in values else "the GPU has"
    if not isinstance(has, int):
        return
    open_cache = MACHINE not in values and not isinstance(settings, SftSettings)
    open_cache = open_cache and settings.rollout.kv_cache_bytes is None
    paths = {UPDATING: "batch.tokens_per_microbatch", GENERATING: "rollout.kv_cache_bytes"}
    for phase, path in paths.items():
        is_open = open_cache and phase == GENERATING
        peak = _peak(values, phase, settings, is_open=is_open)
        if peak <= has:
            continue

        def is_enough(change: Change, on: bool, phase: str = phase, is_open: bool = is_open) -> bool:
            changed = with_values(settings, change)
            return _peak(_values(count(changed, on)), phase, changed, is_open=is_open) <= has

        changes = tuple(_changes(settings, phase, recompute=recompute, adapts=adapts, is_enough=is_enough))
        what = f"the {phase} is {peak / _GIB:,.1f} GiB, {owner} {has / _GIB:,.1f} GiB"
        what += ", though the cache had one sequence alone" if is_open else ""
        overrides = [f"{path}={_text(value)}" for change in changes for path, value in change.items()]
        fix = ", or ".join([*overrides, "a smaller model"])
        where = "model.path" if is_open else path
        found.warn("M005", where, what, fix=fix, suggestions=tuple((each,) for each in overrides))


def _values(lines: Sequence[LedgerLine]) -> Values:
    return {line.name: line.value for line in lines}


def _peak(values: Values, phase: str, settings: Settings, *, is_open: bool) -> int:
    """Bytes of a phase; with a cache that is open, with room for one sequence."""
    peak, cache, token = (values.get(name) or 0 for name in (phase, _CACHE, _TOKEN))
    if not (isinstance(peak, int) and isinstance(cache, int) and isinstance(token, int)):
        return 0
    return peak - cache + min(cache, longest_sequence_tokens(settings) * token) if is_open else peak


def _changes(
    settings: Settings, phase: str, *, recompute: bool, adapts: bool, is_enough: Callable[[Change, bool], bool]
) -> Iterator[Change]:
    """Changes that are enough, each alone, cheapest first."""
    for step in _sizes(settings, phase):

        def fits(change: Change) -> bool:
            return is_enough(change, recompute)

        if (change := next(filter(fits, step.changes), None)) is not None:
            yield step.mildest(change, fits)
    if phase == UPDATING and not recompute and is_enough({}, True):
        yield {"model.gradient_checkpointing": True}
    if adapts and not isinstance(settings, EvalSettings) and settings.model.lora is None:
        rank = LoraSettings.model_fields["rank"].default
        if is_enough({"model.lora": LoraSettings()}, recompute):
            yield {"model.lora.rank": rank}


def _sizes(settings: Settings, phase: str) -> Iterator[Step]:
    if phase == UPDATING and not isinstance(settings, EvalSettings):
        path, least = "batch.tokens_per_microbatch", longest_sample_tokens(settings)
        yield microbatch_step(settings.batch.tokens_per_microbatch, least, lambda size: {path: size})
    if phase == GENERATING and not isinstance(settings, SftSettings):
        given = settings.rollout.kv_cache_bytes
        if given is not None and (whole := given // _MIB):
            sizes = (whole >> times for times in range(1, whole.bit_length()))
            price = "a smaller cache"
            yield Step.of_sizes(price, lambda size: {"rollout.kv_cache_bytes": size * _MIB}, whole + 1, sizes)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
