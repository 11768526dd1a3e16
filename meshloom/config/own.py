"""Names of functions of the user's own: ``file.py:function``.

Owns: telling such a name from the name of something built in, and what can be said of it without running the file. Refuses to
know: what the function is for.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

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

    def fault(self) -> str:
        """Why it cannot be, as far as can be said without running the file; empty if nothing is wrong."""
        if self.path.suffix != ".py" or not self.function.isidentifier():
            return f"{self.path}:{self.function} is not of the form file.py:function"
        try:
            tree = ast.parse(self.path.read_bytes())
        except OSError as error:
            return f"{self.path} cannot be read: {error.strerror}"
        except (SyntaxError, ValueError) as error:
            return f"{self.path} is no Python: {error}"
        starred = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(tree))
        if self.function not in _names(tree) and not starred:
            return f"{self.path} has no function {self.function!r}"
        return ""


def _names(tree: ast.Module) -> set[str]:
    """What a file may give a name to, anywhere in it."""
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return defined | imported | assigned
