"""Several faults of a user's input, told at once.

Owns: the record of one fault and how many of them become one error. Always holds: a user hears of every fault that can be
found before work begins, in one message.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from meshloom.config.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One fault, or one warning.

    Args:
        code: stable short name, such as ``B001``.
        what: the fault in one sentence.
        where: the setting, with file and line, override or default.
        why: the reason it cannot work, when ``what`` does not say it.
        fix: what to change, with the nearest values that work.
        suggestions: changes that were tried and end this fault without another, best first; each is a tuple of overrides
            ``a.b=c`` that belong together.
    """

    code: str
    what: str
    where: str = ""
    why: str = ""
    fix: str = ""
    suggestions: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        labels = (("where", self.where), ("why", self.why), ("change", self.fix))
        return "\n".join([f"[{self.code}] {self.what}", *(f"  {label}: {text}" for label, text in labels if text)])


def require_none(problems: Sequence[Problem], title: str) -> None:
    """Do nothing if there are no problems.

    Args:
        problems: the faults found.
        title: what has them, such as ``run.yaml``.

    Raises:
        UserError: that names every one of them.
    """
    if not problems:
        return
    if len(problems) == 1:
        only = problems[0]
        raise UserError(f"[{only.code}] {only.what}", where=only.where, why=only.why, fix=only.fix)
    numbered = "\n".join(f"{number}. {problem}" for number, problem in enumerate(problems, 1))
    raise UserError(f"{title}: {len(problems)} problems\n{numbered}")
