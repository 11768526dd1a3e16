"""What the doctor says: facts of a machine, and findings with stable codes.

Owns: the records. Refuses to know: how anything is found out. Always holds: a finding says what, why and how to get what is
missing; only one that is required makes the exit code 2.
"""

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from meshloom.config.problems import Problem


class Level(StrEnum):
    """How much a finding matters."""

    REQUIRED = "required"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One finding.

    Args:
        level: how much it matters.
        problem: its code, what, where, why and what to change.
    """

    level: Level
    problem: Problem

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        problem = asdict(self.problem)
        del problem["suggestions"]
        return {"level": str(self.level), **problem}


@dataclass(frozen=True)
class Fact:
    """One thing that this machine has or is.

    Args:
        section: ``machine``, ``devices``, ``packages``, ``nodes`` …
        name: what.
        value: for people.
    """

    section: str
    name: str
    value: str


@dataclass
class Report:
    """Facts and findings, in the order in which they were found."""

    facts: list[Fact] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def fact(self, section: str, name: str, value: object) -> None:
        """Note a fact."""
        self.facts.append(Fact(section, name, str(value)))

    def _find(self, level: Level, code: str, what: str, where: str, why: str, fix: str) -> None:
        self.findings.append(Finding(level, Problem(code=code, what=what, where=where, why=why, fix=fix)))

    def require(self, code: str, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        """Something that is required is missing."""
        self._find(Level.REQUIRED, code, what, where, why, fix)

    def warn(self, code: str, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        """Something is likely not meant, or costs time."""
        self._find(Level.WARNING, code, what, where, why, fix)

    def note(self, code: str, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        """Something worth knowing."""
        self._find(Level.NOTE, code, what, where, why, fix)

    @property
    def is_fine(self) -> bool:
        """Whether nothing that is required is missing."""
        return all(finding.level is not Level.REQUIRED for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        facts: dict[str, dict[str, str]] = {}
        for fact in self.facts:
            facts.setdefault(fact.section, {})[fact.name] = fact.value
        return {"ok": self.is_fine, "facts": facts, "findings": [finding.as_json() for finding in self.findings]}
