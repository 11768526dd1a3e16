"""Errors a user can act on.

Owns: the exception types for bad input and for a run that stops itself, and which of the system's errors are a user's. Always
holds: an error says what, where, why and what to change; bad input is found before anything is written over.
"""

import errno

_FULL = (errno.ENOSPC, errno.EDQUOT)


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


def is_disk_full(error: Exception) -> bool:
    """Whether an error says that a disk or quota is full.

    Libraries in Rust (safetensors, tokenizers) raise errors of their own, which have the system's number in their message only.
    """
    if isinstance(error, OSError):
        return error.errno in _FULL
    return any(f"(os error {number})" in str(error) for number in _FULL)


def in_words(error: Exception) -> UserError | None:
    """What an error comes to that is the user's although it looks like the program's; none if it is the program's."""
    where = str(error.filename or "") if isinstance(error, OSError) else ""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        what = f"the file name {where[:40]}… has {len(where)} letters, more than a file system takes"
        return UserError(what, fix="the setting that names it takes a path")
    if is_disk_full(error):
        return RunFault("the disk is full", where=where, why=str(error), fix="free some; a run goes on with --resume")
    return None
