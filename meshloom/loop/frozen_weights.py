"""Weights that a run reads again when it is resumed: those below adapters, and those of a reference that stands still.

Owns: which folders these are, a digest of each. Refuses to know: what is told of one that has changed. Always holds: a digest
reads a few MiB of a file, wherever the folder is; weights that were trained on differ all over, so it finds them.
"""

import hashlib
from pathlib import Path

from meshloom.config.settings import TrainSettings
from meshloom.plan.reference import has_own_reference, refreshes

_PLACES, _BLOCK_BYTES = 32, 2**16


def frozen_folders(settings: TrainSettings) -> dict[str, Path]:
    """The folders by the setting that names them."""
    found = {"model.path": settings.model.path} if settings.model.lora is not None else {}
    if has_own_reference(settings) and not refreshes(settings):
        own = settings.reference.model
        found |= {"model.path": settings.model.path} if own is None else {"reference.model": own}
    return {setting: Path(path) for setting, path in found.items() if path is not None}


def frozen_digests(settings: TrainSettings) -> dict[str, str]:
    """A digest of each folder's weights, by the setting that names it."""
    return {setting: weights_digest(folder) for setting, folder in frozen_folders(settings).items()}


def weights_digest(folder: Path) -> str:
    """Of the names and sizes of a folder's weights, and of 64 KiB at 32 places of each file."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = file.stat().st_size
        digest.update(f"{file.name}/{size}".encode())
        with file.open("rb") as weights:
            for place in range(_PLACES):
                weights.seek(place * max(0, size - _BLOCK_BYTES) // (_PLACES - 1))
                digest.update(weights.read(_BLOCK_BYTES))
    return digest.hexdigest()
