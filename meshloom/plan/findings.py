"""What is found wrong with a run's settings: refusals and warnings.

Owns: how a finding is noted. Always holds: each names its setting and where its value came from.
"""

from dataclasses import dataclass, field, replace

from meshloom.config.problems import Problem
from meshloom.config.settings import Settings


@dataclass
class Findings:
    """Refusals and warnings about one run's settings."""

    settings: Settings
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)

    def refuse(
        self,
        code: str,
        path: str,
        what: str,
        *,
        why: str = "",
        fix: str = "",
        suggestions: tuple[tuple[str, ...], ...] = (),
    ) -> None:
        self.problems.append(replace(self._problem(code, path, what, why, fix), suggestions=suggestions))

    def warn(
        self,
        code: str,
        path: str,
        what: str,
        *,
        why: str = "",
        fix: str = "",
        suggestions: tuple[tuple[str, ...], ...] = (),
    ) -> None:
        self.warnings.append(replace(self._problem(code, path, what, why, fix), suggestions=suggestions))

    def _problem(self, code: str, path: str, what: str, why: str, fix: str) -> Problem:
        return Problem(code=code, what=what, where=f"{path} ({self.settings.provenance.of(path)})", why=why, fix=fix)
