"""Lines of the memory ledger of one device, and the sums of its phases.

Owns: what is named, and what is added up. Refuses to know: which roles there are, how bytes follow. Always holds: a holding
that was taken is in the sums, whether or not a line names it.
"""

from collections.abc import Mapping, Sequence

from meshloom.plan.ledger import DERIVED, LedgerLine
from meshloom.plan.residency import Holding, Phase
from meshloom.plan.sharded_memory import FLOAT32, DeviceLedger

GENERATING, UPDATING = "peak while generating", "peak while updating"
"""Names of the lines that are compared."""
BOTH = (Phase.GENERATE, Phase.UPDATE)
_SUM = "sum of what the phase holds; libraries and fragmentation come on top"


class MemoryLines:
    """Names what is held, line by line, and adds up phases; the bytes are those of the sharded ledger."""

    def __init__(self) -> None:
        self.lines: list[LedgerLine] = []
        self._all: list[Holding] = []
        self._last: Mapping[str, Holding] = {}

    def take(self, holdings: Sequence[Holding]) -> None:
        """What a role holds; its parts can be named then."""
        self._all += holdings
        self._last = {holding.name: holding for holding in holdings}

    def held(self, name: str, formula: str, *, shown: str = "", source: str = DERIVED) -> None:
        """A line of what the role that was taken last holds."""
        holding = self._last[name]
        phases = tuple(phase for phase in BOTH if phase in holding.phases)
        self.bytes(shown or name, holding.bytes, formula, phases=phases, source=source)

    def count(self, name: str, value: int, formula: str, source: str = "model.path") -> None:
        self.lines.append(LedgerLine(section="memory", name=name, value=value, formula=formula, source=source))

    def bytes(
        self, name: str, value: int, formula: str, *, phases: Sequence[Phase] = (), source: str = DERIVED
    ) -> None:
        when = tuple(map(str, phases))
        line = LedgerLine(
            section="memory", name=name, value=value, formula=formula, source=source, unit="bytes", phases=when
        )
        self.lines.append(line)

    def peaks(self, *, generates: bool, updates: bool) -> None:
        parts, ledger = _SUM, DeviceLedger(holdings=tuple(self._all))
        if generates:
            self.bytes(GENERATING, ledger.held(Phase.GENERATE), parts)
        if updates:
            self.bytes(UPDATING, ledger.held(Phase.UPDATE), parts)


def checkpoint_bytes_each(width: int) -> int:
    """Bytes of a checkpoint for each trained parameter: it as it is, its master where there is one, and both moments."""
    return width + (0 if width == FLOAT32 else FLOAT32) + 2 * FLOAT32
