"""What is executed: files of the user's and, behind walls, programs of the model. Texts and files of others never are."""

import ast
from collections.abc import Iterator
from pathlib import Path

import meshloom

PACKAGE = Path(meshloom.__file__).parent
EXECUTES = {"rewards/function.py", "environments/user_code.py", "rewards/sandbox/check.py", "rewards/sandbox/inside.py"}
"""Files that run a user's file, or a program in a sandbox."""
UNPICKLES = {"rewards/worker.py", "environments/worker.py", "killable/serving.py"}
"""Worker processes, which read what this program wrote to them."""


def calls() -> Iterator[tuple[str, str]]:
    """File and name of each call, as it is written: ``eval``, ``torch.load``."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield file.relative_to(PACKAGE).as_posix(), ast.unparse(node.func)


def test_no_text_is_evaluated_and_no_pickle_of_a_file_is_loaded() -> None:
    """A model's output that reached ``eval``, or a checkpoint that is a pickle, would run what somebody else wrote."""
    where: dict[str, set[str]] = {}
    for file, name in calls():
        where.setdefault(name, set()).add(file)
    assert where["exec"] == EXECUTES
    assert where["pickle.loads"] == UNPICKLES
    for name in ("eval", "pickle.load", "torch.load", "yaml.load", "yaml.unsafe_load", "os.system", "marshal.loads"):
        assert name not in where, where[name]
