"""Files on disk: replacing one in one moment, and who may read it.

Always holds: whoever reads the file, at any time and after any kill, finds the whole old one or the whole new one.
"""

import os
from collections.abc import Iterable
from pathlib import Path


def replace_file(path: Path, chunks: Iterable[bytes]) -> None:
    """Write ``chunks`` aside, bring them to the disk, and rename them over ``path``."""
    aside = aside_of(path)
    with aside.open("wb") as file:
        file.writelines(chunks)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)


def aside_of(path: Path) -> Path:
    """Where ``replace_file`` writes what is to become ``path``; a kill leaves it there."""
    return path.with_name(f".{path.name}.new")


def sync_folder(path: Path) -> None:
    """Bring a folder's list of names to the disk, so that a rename in it outlives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def give_usual_modes(folder: Path) -> None:
    """Let all files of a folder be read by whom the user's other files can be read; safetensors writes for its owner alone."""
    probe = folder / f".mode-{os.getpid()}"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(mode)
