"""A word to the user about where it is that reward functions print.

Owns: when it is said. Refuses to know: how output is kept (``killable.output``). Always holds: it is said once in a run, and
nothing that was printed reaches the terminal.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from meshloom.observe.records import SAMPLES_FILE


@dataclass
class PrintedWatch:
    """Tells of the first output of a run.

    Args:
        notice: called with a sentence for the user.
    """

    notice: Callable[[str], None]
    is_told: bool = False

    def look(self, printed: Iterable[str]) -> None:
        """Look at what was printed over some samples."""
        if not self.is_told and any(printed):
            self.is_told = True
            self.notice(f"what the reward function prints is in {SAMPLES_FILE}, as `printed` of its samples")
