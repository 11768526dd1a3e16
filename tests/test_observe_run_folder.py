"""The run folder: who may have it, what is in it, and what a kill leaves."""

import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from meshloom.config.errors import UserError
from meshloom.config.settings import TrainSettings
from meshloom.observe.records import METRICS_FILE, SAMPLES_FILE, read_metrics, read_samples, rewind_file
from meshloom.observe.run_folder import RunFolder, RunState, read_settings, read_status


def settings(run_dir: Path) -> TrainSettings:
    given = {"run_dir": str(run_dir), "model": {"path": "model"}, "data": {"train": {"files": ["ü.jsonl"]}}}
    return TrainSettings.model_validate(given)


def metric(step: int, **metrics: float) -> dict:
    return {
        "step": step,
        "kind": "train",
        "metrics": metrics or {"loss": step / 2},
        "phases": {"update": 1.0},
        "time": 1e9 + step,
    }


def sample(step: int, response: str = "so") -> dict:
    return {
        "step": step,
        "kind": "train",
        "row": 1,
        "group": 0,
        "prompt": "p",
        "response": response,
        "response_ids": [1, 2],
    }


def test_a_new_folder_holds_settings_and_plan(tmp_path):
    path = tmp_path / "deep" / "run"
    with RunFolder.create(path, settings=settings(path), plan_text="the plan\n", plan={"updates": 3}) as run:
        assert run.checkpoints == path / "checkpoints" and not run.checkpoints.exists()
    assert TrainSettings.model_validate(read_settings(path)) == settings(path)
    assert yaml.safe_load((path / "settings.yaml").read_text())["data"]["train"]["files"] == ["ü.jsonl"]
    assert (path / "plan.txt").read_text() == "the plan\n"
    assert json.loads((path / "plan.json").read_text()) == {"updates": 3}
    assert not list(path.glob(".*.new"))


def test_a_filled_folder_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="not empty") as caught:
        RunFolder.create(tmp_path, settings=settings(tmp_path))
    assert caught.value.fix == "use another run_dir", "there is no run to resume"
    assert "thesis.txt" in caught.value.why
    assert [item.name for item in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_in_the_folders_place_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match="is a file"):
        RunFolder.create(tmp_path / "run")
    with pytest.raises(UserError, match="cannot be made"):
        RunFolder.create(tmp_path / "run" / "inside")


def test_resuming_where_there_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="no run to resume"):
        RunFolder.resume(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_a_folder_that_was_taken_but_never_filled_can_be_taken_again(tmp_path):
    (tmp_path / "run.lock").write_text("pid 1\n")
    with RunFolder.create(tmp_path, settings=settings(tmp_path)):
        assert (tmp_path / "run.lock").read_text().startswith(f"pid {os.getpid()} on ")


HOLD = """
import os, sys, time
from meshloom.observe.run_folder import RunFolder
run = RunFolder.resume(sys.argv[1])
run.log_metrics({"step": 1, "kind": "train", "metrics": {"loss": 1.0}, "time": 0.0})
told, tell = os.pipe()
child = os.fork()  # a worker that outlives its parent, as reward processes may
if child == 0:
    os.write(tell, b"x")
    time.sleep(30)
    os._exit(0)
os.read(told, 1)  # the child runs, so it has given its copy of the lock up
print(child, flush=True)
time.sleep(30)
"""


def test_a_folder_in_use_names_its_process_and_kill_9_frees_it_though_a_worker_lives_on(tmp_path):
    RunFolder.create(tmp_path, settings=settings(tmp_path)).close()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    child = int(holder.stdout.readline())
    try:
        for take in (RunFolder.resume, RunFolder.create):
            with pytest.raises(UserError, match=f"in use by pid {holder.pid} on "):
                take(tmp_path)
        assert read_status(tmp_path)["state"] == RunState.RUNNING
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        os.kill(child, 0)
        assert read_status(tmp_path)["state"] == RunState.LOST
        RunFolder.resume(tmp_path).close()
    finally:
        holder.kill()
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()
    assert read_metrics(tmp_path)[0]["step"] == 1


def test_records_come_back_as_they_were_logged(tmp_path):
    with RunFolder.create(tmp_path) as run:
        run.log_metrics(metric(1, loss=np.float32(0.5), updates=np.int64(3), gap=math.nan, ratio=math.inf))
        odd = sample(1, "line\nend \u2028 \x00 ü \ud800 </script>") | {
            "reward": math.nan,
            "advantage": np.float64(0.25),
        }
        run.log_samples([odd, sample(1)])
    assert read_metrics(tmp_path)[0]["metrics"] == {"loss": 0.5, "updates": 3, "gap": None, "ratio": None}
    first, second = read_samples(tmp_path)
    assert first == odd | {"reward": None, "advantage": 0.25}
    assert second == sample(1)


def test_a_half_last_line_is_passed_over_and_cut_off_before_the_next_record(tmp_path):
    with RunFolder.create(tmp_path, settings=settings(tmp_path)) as run:
        run.log_metrics(metric(1))
    with (tmp_path / METRICS_FILE).open("ab") as file:
        file.write(b'{"step": 2, "kind": "tr')
    assert [record["step"] for record in read_metrics(tmp_path)] == [1]
    with RunFolder.resume(tmp_path) as run:
        run.log_metrics(metric(3))
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 3]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    (tmp_path / METRICS_FILE).write_bytes(b'{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(UserError) as caught:
        read_metrics(tmp_path)
    assert caught.value.where.endswith("metrics.jsonl:2")


def test_rewind_drops_what_came_after_the_step_from_both_files(tmp_path):
    with RunFolder.create(tmp_path) as run:
        for step in range(5):
            run.log_metrics(metric(step))
            run.log_samples([sample(step, str(i)) for i in range(3)])
        kept = (tmp_path / METRICS_FILE).read_bytes().splitlines(keepends=True)[:3]
        assert run.rewind(2) == 2 + 6
        run.log_metrics(metric(3))
        assert run.rewind(2) == 1
        assert (tmp_path / METRICS_FILE).read_bytes() == b"".join(kept)
        run.log_metrics(metric(3))
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 1, 2, 3]
    assert [record["step"] for record in read_samples(tmp_path)] == [0] * 3 + [1] * 3 + [2] * 3


def test_rewind_drops_a_half_last_line(tmp_path):
    file = tmp_path / SAMPLES_FILE
    file.write_bytes(b'{"step": 1}\n{"step": 1, "resp')
    assert rewind_file(file, 1) == 0
    assert file.read_bytes() == b'{"step": 1}\n'


REWIND = """
import sys
from pathlib import Path
from meshloom.observe.atomic import replace_file
from meshloom.observe.records import rewind_file
file = Path(sys.argv[1])
whole = [b'{"step": %d, "text": "%s"}\\n' % (i, b"x" * 500) for i in range(2000)]
print("ready", flush=True)
while True:
    replace_file(file, whole)
    rewind_file(file, 999)
"""


def test_a_kill_at_any_moment_of_a_rewind_leaves_the_old_or_the_new_file(tmp_path):
    file = tmp_path / METRICS_FILE
    seen = set()
    for seed in range(6):
        process = subprocess.Popen([sys.executable, "-c", REWIND, str(file)], stdout=subprocess.PIPE)
        process.stdout.readline()
        while not file.exists():
            time.sleep(0.001)
        time.sleep(random.Random(seed).uniform(0.02, 0.12))
        process.kill()
        process.wait()
        process.stdout.close()
        assert file.read_bytes().endswith(b"\n")
        seen.add(len(read_metrics(file)))
    assert seen <= {1000, 2000}


def test_leaving_through_an_exception_is_noted_in_the_status(tmp_path):
    for error, state in ((KeyboardInterrupt(), RunState.STOPPED), (ValueError("no luck\nat all"), RunState.FAILED)):
        path = tmp_path / state
        with pytest.raises(type(error)), RunFolder.create(path) as run:
            run.set_status(RunState.RUNNING, step=7, steps=9)
            raise error
        status = read_status(path)
        assert (status["state"], status["step"], status["steps"]) == (state, 7, 9)
    assert status["reason"] == "ValueError: no luck"


def test_a_run_that_fails_is_noted_with_the_last_step_that_has_records(tmp_path):
    with pytest.raises(OSError), RunFolder.create(tmp_path) as run:
        run.set_status(RunState.RUNNING, step=0, steps=9)
        for step in (1, 2):
            run.log_metrics({"step": step, "kind": "train", "time": 0.0, "phases": {}, "metrics": {"loss": 1.0}})
        raise OSError("a worker")
    status = read_status(tmp_path)
    assert (status["state"], status["step"], status["steps"]) == (RunState.FAILED, 2, 9)


def test_a_record_that_cannot_be_written_names_its_file(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunFolder.create(tmp_path) as run:
        record = {"step": 1, "kind": "train", "time": 0.0, "phases": {}, "metrics": {}}
        run.log_metrics(record)
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size, hard))
        try:
            with pytest.raises(OSError, match=r"metrics\.jsonl"):
                run.log_metrics(record)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_status_that_was_set_stands_against_a_later_exception(tmp_path):
    with pytest.raises(OSError), RunFolder.create(tmp_path) as run:
        run.set_status(RunState.FINISHED, step=9, steps=9)
        raise OSError("the report")
    assert read_status(tmp_path)["state"] == RunState.FINISHED


def test_a_closed_folder_can_be_taken_by_the_same_process(tmp_path):
    with RunFolder.create(tmp_path, settings=settings(tmp_path)) as run:
        with pytest.raises(UserError, match=f"pid {os.getpid()}"):
            RunFolder.resume(tmp_path)
        run.sync()
    RunFolder.resume(tmp_path).close()
