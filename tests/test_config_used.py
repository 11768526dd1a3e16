"""Every setting is read by something that runs."""

import ast
from pathlib import Path

import meshloom
from meshloom.config import settings
from meshloom.config.settings import Settings

PACKAGE = Path(meshloom.__file__).parent
DESCRIBES = {
    PACKAGE / "plan" / name
    for name in (
        "algorithm_checks.py",
        "checks.py",
        "group_checks.py",
        "memory.py",
        "count.py",
        "inputs.py",
        "report.py",
        "reward_checks.py",
        "model_folder.py",
        "engines.py",
        "recompute.py",
        "decoding.py",
    )
}
"""Modules that say something about settings and do nothing with them."""


def attributes_read() -> set[str]:
    """Names of all attributes that are read in the package, but for config/ and what only describes a run."""
    names: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        if PACKAGE / "config" in file.parents or file in DESCRIBES:
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names |= {
            node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        }
    return names


def test_what_only_describes_a_run_exists() -> None:
    assert all(file.is_file() for file in DESCRIBES)


def test_no_setting_is_validated_and_never_read() -> None:
    groups = [kind for kind in vars(settings).values() if isinstance(kind, type) and issubclass(kind, Settings)]
    assert len(groups) > 10
    read = attributes_read()
    unread = [f"{group.__name__}.{name}" for group in groups for name in group.model_fields if name not in read]
    assert unread == []
