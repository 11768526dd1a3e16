"""What a run says when it ends."""

from collections.abc import Callable
from pathlib import Path

import pytest

from meshloom.config.errors import RunFault
from meshloom.loop.session import Session
from meshloom.observe.run_folder import RunFolder
from tests.lesson_runs import sft_settings, train_settings

Out = pytest.CaptureFixture[str]


def session(path: Path, make: Callable = train_settings, *, steps: int = 70, first_step: int = 0) -> Session:
    settings = make(path.parent, path)
    return Session(RunFolder.create(path, settings=settings), settings, steps=steps, first_step=first_step)


def ending(out: Out) -> list[str]:
    """The lines after the one the run begins with."""
    return out.readouterr().out.splitlines()


@pytest.mark.parametrize(("make", "command"), [(train_settings, "train"), (sft_settings, "sft")])
def test_a_stopped_run_names_the_command_that_goes_on(
    tmp_path: Path, capsys: Out, make: Callable, command: str
) -> None:
    """Nobody said how to go on."""
    path = tmp_path / ("a long name " * 9).strip()
    with session(path, make) as run:
        run.log(command, {"loss": 1.0}, step=20)
        assert run.end(step=20, stopped=True) == 130
    told = f"stopped after step 20 of 70, saved; go on with: meshloom {command} '{path}/settings.yaml' --resume"
    assert ending(capsys)[-1] == told


def test_a_run_that_is_stopped_before_its_first_record_ends_like_another(tmp_path: Path, capsys: Out) -> None:
    """There was nothing to report, and the run ended with an error that said so."""
    with session(tmp_path / "run") as run:
        assert run.end(step=0, stopped=True) == 130
    assert ending(capsys)[-1].startswith("stopped before step 1 of 70; go on with: meshloom train ")


def test_a_finished_run_tells_what_came_out_and_what_comes_next(tmp_path: Path, capsys: Out) -> None:
    """A run that was done said nothing."""
    path = tmp_path / "run"
    with session(path) as run:
        (path / "checkpoints" / "step-000070").mkdir(parents=True)
        run.log("validation", {"accuracy": 0.25}, step=0)
        run.log("train", {"reward_mean": 1.0}, step=70)
        run.log("validation", {"accuracy": 0.75}, step=70)
        assert run.end(step=70, stopped=False) == 0
    first, *rest = ending(capsys)[-4:]
    assert first.startswith("finished 70 steps in ") and first.endswith("   accuracy 25.0 % → 75.0 %")
    assert rest == [
        f"report:     {path}/report.html",
        f"checkpoint: {path}/checkpoints/step-000070",
        f"next:       meshloom export {path} OUT",
    ]


def test_a_resumed_run_does_not_call_its_own_time_the_whole_run_s(tmp_path: Path, capsys: Out) -> None:
    with session(tmp_path / "run", first_step=60) as run:
        run.log("train", {"reward_mean": 1.0}, step=70)
        assert run.end(step=70, stopped=False) == 0
    assert any(line.startswith("finished 70 steps, the last 10 in ") for line in ending(capsys))


def test_a_run_that_is_stopped_at_once_says_from_where_it_goes_on(tmp_path: Path, capsys: Out) -> None:
    with pytest.raises(KeyboardInterrupt), session(tmp_path / "run"):
        raise KeyboardInterrupt
    assert ending(capsys)[-1].startswith(
        "stopped at once; nothing was saved yet, so it begins anew with: meshloom train"
    )


def test_a_run_that_fails_leaves_a_report_with_its_ending(tmp_path: Path, capsys: Out) -> None:
    """There was none, although everything up to the fault was recorded."""
    path = tmp_path / "run"
    with pytest.raises(RunFault), session(path) as run:
        run.log("train", {"reward_mean": 1.0}, step=3)
        raise RunFault("rank 1 (on node2, cuda:0, actor) was killed by SIGKILL", why="want of memory")
    assert ending(capsys)[-1] == f"report:     {path}/report.html"
    page = (path / "report.html").read_text().replace('": "', '":"')
    assert '"state":"failed"' in page and "rank 1 (on node2, cuda:0, actor) was killed by SIGKILL" in page


def test_a_run_that_fails_before_its_first_record_leaves_none(tmp_path: Path, capsys: Out) -> None:
    with pytest.raises(RunFault), session(tmp_path / "run"):
        raise RunFault("the disk is full")
    assert not (tmp_path / "run" / "report.html").exists() and "report" not in capsys.readouterr().out
