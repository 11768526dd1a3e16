"""Names of functions of the user's own: ``file.py:function``.

Owns: telling such a name from the name of something built in. Refuses to know: what the function is for, what is in its file
(``config.user_file``).
"""

from dataclasses import dataclass
from pathlib import Path

from meshloom.config.user_file import Lacking, lacking

OWN_CHOICES = ("advantage", "policy_loss", "kl_estimator")
"""Keys of the algorithm that may name such a function."""


@dataclass(frozen=True)
class OwnName:
    """A function in a file of the user's."""

    path: Path
    function: str

    @classmethod
    def of(cls, name: str) -> "OwnName | None":
        """What a name of the form ``file.py:function`` names; none for the name of something built in."""
        path, colon, function = name.rpartition(":")
        return cls(Path(path), function) if colon else None

    def lacking(self) -> Lacking | None:
        """Why it cannot be, as far as can be said without running the file; none if nothing is wrong."""
        return lacking(self.path, self.function)
