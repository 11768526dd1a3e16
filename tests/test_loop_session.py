"""Checkpoints of a run in the background."""

import time
from dataclasses import dataclass
from pathlib import Path

from meshloom.loop.session import Cut, Session
from meshloom.observe.run_folder import RunFolder
from tests.lesson_runs import train_settings


@dataclass
class Told:
    """A copy of a model that takes a while to write, and tells when it is taken and when it is written."""

    name: str
    events: list[str]

    num_bytes = 0

    def taken(self) -> "Told":
        self.events.append(f"{self.name} taken")
        return self

    def write(self, folder: Path) -> None:
        time.sleep(0.2)
        (folder / "weights").write_text(self.name)
        self.events.append(f"{self.name} written")


def test_a_copy_for_a_checkpoint_is_taken_once_the_one_before_is_written(tmp_path: Path) -> None:
    """Copies were taken while the last one was still being written: ranks held two of them."""
    settings, events = train_settings(tmp_path, tmp_path / "run", "checkpoint.asynchronous=true"), []
    folder = RunFolder.create(tmp_path / "run", settings=settings)
    with Session(folder, settings, steps=2, first_step=0) as run:
        for step in (1, 2):
            run.save(Told(f"{step}", events).taken, Cut({"step": step}, {}), step=step, score=None)
        run.store.wait()
    assert events == ["1 taken", "1 written", "2 taken", "2 written"]
