"""Whether layers are recomputed in the backward pass: only where the memory ledger asks for it.

Owns: the rule for ``model.gradient_checkpointing: auto``. Refuses to know: how layers are recomputed. Always
holds: the plan and the run decide by this one function; what cannot be known yet is left open and said.
"""

from dataclasses import dataclass

from meshloom.config.settings import SftSettings, TrainSettings
from meshloom.plan.headroom import FRAGMENTS, LIBRARIES, needed_bytes
from meshloom.plan.ledger import LedgerLine
from meshloom.plan.memory import memory_ledger, on_gpu
from meshloom.plan.memory_lines import UPDATING
from meshloom.plan.model_folder import ModelFolder

RECOMPUTED = "recomputed"
"""Name of the plan's line."""


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """What ``model.gradient_checkpointing`` comes to.

    Args:
        on: whether layers are recomputed; false while it is open.
        is_open: whether it depends on a GPU that was not asked.
        formula: from what it follows.
    """

    on: bool
    is_open: bool
    formula: str

    def line(self, source: str) -> LedgerLine:
        """The plan's line."""
        value = "open" if self.is_open else "yes" if self.on else "no"
        return LedgerLine(section="compute", name=RECOMPUTED, value=value, formula=self.formula, source=source)


def choose_recompute(
    settings: TrainSettings | SftSettings,
    folder: ModelFolder,
    device_memory: int | None,
    critic: ModelFolder | None = None,
) -> Recompute:
    """Whether a run recomputes its layers.

    Args:
        settings: of the run.
        folder: its model.
        device_memory: bytes that a GPU has for the run; none if it was not asked.
        critic: folder of the critic's model; none where there is no critic.

    Raises:
        UnknownShape: if ``auto`` needs an estimate that config.json is not enough for.
    """
    choice, gpu = settings.model.gradient_checkpointing, on_gpu(settings.device)
    if choice != "auto":
        return Recompute(on=choice, is_open=False, formula="each layer, in the backward pass, as given")
    has = device_memory if gpu else _memory_of_machine()
    if has is None:
        return Recompute(on=False, is_open=True, formula="auto: follows from the GPU's memory when the run begins")
    lines = memory_ledger(settings, folder, recompute=False, critic=critic)
    peak = sum(line.value for line in lines if line.name == UPDATING and isinstance(line.value, int))
    needed = needed_bytes(peak) if gpu else peak
    margin = f" × {1 + FRAGMENTS:g} + {LIBRARIES // 2**30} GiB" if gpu else ""
    formula = (
        f"auto: {UPDATING} without it, {peak / 2**30:,.1f} GiB{margin} {'>' if needed > has else '≤'} "
        f"{has / 2**30:,.1f} GiB that {'the GPU has free' if gpu else 'this machine has'}"
    )
    return Recompute(on=needed > has, is_open=False, formula=formula)


def _memory_of_machine() -> int:
    """Bytes of this machine's memory."""
    import psutil

    return psutil.virtual_memory().total
