"""Errors a user can act on.

Owns: the exception types for bad input and for a run that stops itself. Always holds: an error says what, where, why and
what to change; bad input is found before anything is written over.
"""


class UserError(Exception):
    """Bad input: a setting, a file, a row, a model folder. The command line prints it and exits with ``exit_code``.

    Args:
        what: the fault in one sentence.
        where: the setting, file or row it is in.
        why: the reason it cannot work, when ``what`` does not say it.
        fix: what to change, with the nearest values that work.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        self.what, self.where, self.why, self.fix = what, where, why, fix
        lines = [what]
        lines += [f"  {label}: {text}" for label, text in (("where", where), ("why", why), ("change", fix)) if text]
        super().__init__("\n".join(lines))


class RunFault(UserError):
    """A run that must not go on: rewards that fail, a sampler that disagrees with the trainer. Its checkpoints stand."""

    exit_code = 3
