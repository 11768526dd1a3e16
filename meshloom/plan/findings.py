"""What is found wrong with a run's settings: refusals and warnings.

Owns: how a finding is noted. Always holds: each names its setting and where its value came from.
"""

from dataclasses import dataclass, field
from typing import TypedDict, Unpack

from meshloom.config.problems import Problem
from meshloom.config.settings import Settings


class More(TypedDict, total=False):
    """What may be said of a finding besides: why it matters, what to change, and overrides that do so."""

    why: str
    fix: str
    suggestions: tuple[tuple[str, ...], ...]


@dataclass
class Findings:
    """Refusals and warnings about one run's settings."""

    settings: Settings
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)

    def refuse(self, code: str, path: str, what: str, **more: Unpack[More]) -> None:
        self.problems.append(self._problem(code, path, what, more))

    def warn(self, code: str, path: str, what: str, **more: Unpack[More]) -> None:
        self.warnings.append(self._problem(code, path, what, more))

    def _problem(self, code: str, path: str, what: str, more: More) -> Problem:
        return Problem(code=code, what=what, where=f"{path} ({self.settings.provenance.of(path)})", **more)
