"""A rank is killed while the controller of a run waits for something else: the run ends at once, and names the rank."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from meshloom.observe.run_folder import read_status
from tests.lesson_runs import command, kill, lives, start, train_settings, wait_until, write_inputs
from tests.test_many_devices import is_worker

ENDS_S = 20.0
SLOW = """
import time
from pathlib import Path

def score(request):
    Path({began!r}).touch()
    time.sleep(600)

class Game:
    def reset(self, task):
        return "say"
    def step(self, turn):
        Path({began!r}).touch()
        time.sleep(600)
    def close(self):
        pass
"""
WAITS = {
    "rewards": ("reward.function={file}:score", "reward.deadline_s=600"),
    "environments": ("reward.function=null", "environment.custom={file}:Game", "environment.step_deadline_s=600")
    + ("environment.max_turns=2", "rollout.max_response_tokens=32"),
}
BESIDE = ("placement.actor=[0]", "placement.reference=[0]", "placement.rollout=[1]", "algorithm.max_lag_versions=2")


@pytest.mark.parametrize(
    ("waits", "changes"),
    [
        ("rewards", ()),
        pytest.param("rewards", BESIDE, marks=pytest.mark.slow),
        pytest.param("environments", (), marks=pytest.mark.slow),
        pytest.param("environments", BESIDE, marks=pytest.mark.slow),
    ],
)
def test_a_rank_killed_while_others_are_awaited_ends_the_run(
    waits: str, changes: tuple[str, ...], tmp_path: Path
) -> None:
    """The controller used to wait until all rewards had come, and to call them the cause."""
    inputs, file, began, output = (
        write_inputs(tmp_path / "in"),
        tmp_path / "slow.py",
        tmp_path / "began",
        tmp_path / "out",
    )
    file.write_text(SLOW.format(began=str(began)))
    given = [change.format(file=file) for change in WAITS[waits]]
    settings = train_settings(
        inputs, tmp_path / "run", "validation.before_training=false", "cluster.devices_per_node=2", *given, *changes
    )
    process = start(command(settings), output)
    assert wait_until(began.exists, process, timeout=120), output.read_text()
    started = psutil.Process(process.pid).children(recursive=True)
    victim = next(child for child in started if is_worker(child) and "rank 1" in " ".join(child.cmdline()))
    struck_at = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    process.join(3 * ENDS_S)
    seconds = time.monotonic() - struck_at
    if process.exitcode is None:
        kill(process)
    assert process.exitcode == 3, output.read_text()
    assert seconds < ENDS_S
    assert "error: rank 1 " in output.read_text() and "was killed by SIGKILL" in output.read_text()
    assert read_status(tmp_path / "run")["state"] == "failed"
    assert not any(map(lives, started))
