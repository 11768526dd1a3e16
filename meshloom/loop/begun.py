"""Whether a run takes up the folder that it is given, though nobody said so.

Owns: what a run has left that ended before its first step was done, and that the same command then begins it anew. Refuses to
know: why it ended, how a run goes on. Always holds: a step, a checkpoint, what was measured with other settings, or by a run
that has finished, is never dropped unasked; a folder that another process holds is left alone.
"""

from pathlib import Path

from meshloom.config.errors import UserError
from meshloom.config.load import load_settings
from meshloom.config.resume import contradictions
from meshloom.config.settings import SftSettings, TrainSettings
from meshloom.observe.lock import is_locked
from meshloom.observe.records import read_metrics, read_samples
from meshloom.observe.run_folder import CHECKPOINTS_FOLDER, SETTINGS_FILE, RunState, read_status

BEGINS_ANEW = "no step of the run in this folder had been saved: it begins anew"


def takes_up(settings: TrainSettings | SftSettings, *, resume: bool) -> bool:
    """Whether a run goes on in its folder: as asked, or since the run there ended before its first step was done and everything
    that is dropped is made again.

    Args:
        settings: of the run.
        resume: whether it was asked to go on.
    """
    folder = Path(settings.run_dir)
    if resume or not (folder / SETTINGS_FILE).is_file() or is_locked(folder):
        return resume
    try:
        return _lost_nothing(folder, settings)
    except UserError:  # what is there cannot be read: a fresh start refuses the folder
        return False


def _lost_nothing(folder: Path, settings: TrainSettings | SftSettings) -> bool:
    """Whether the run of a folder left at most what it measured before its first step, with these settings.

    Raises:
        UserError: if the folder's files are of another kind of run, or damaged.
    """
    saved = load_settings(type(settings), folder / SETTINGS_FILE)
    # The folder of an evaluation reads as that of a run of few settings.
    if any((folder / CHECKPOINTS_FOLDER).glob("step-*")) or read_status(folder)["state"] == RunState.FINISHED:
        return False
    records = [*read_metrics(folder), *read_samples(folder)]
    return not records or (not any(record["step"] for record in records) and not contradictions(saved, settings))
