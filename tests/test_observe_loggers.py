"""Loggers by name, with the services' real packages."""

import importlib.util
import os
from pathlib import Path

import pytest

from meshloom.config.errors import UserError
from meshloom.observe.loggers import LOGGERS, LoggerContext, open_loggers, register_logger


def context(run_dir: Path, resume_step: int | None = None) -> LoggerContext:
    settings = {"seed": 1, "batch": {"steps": 3}, "loggers": ["tensorboard"]}
    return LoggerContext(run_dir=run_dir, project="tests", settings=settings, resume_step=resume_step)


def record(step: int, reward: float | None) -> dict:
    metrics = {"reward_mean": reward, "loss": None}
    return {"step": step, "kind": "train", "metrics": metrics, "phases": {"update": 0.5}, "time": 1e9 + step}


def log_with_a_resume(name: str, run_dir: Path) -> None:
    """Steps 1 to 3, then a resume after step 1 that makes step 2 again."""
    first = open_loggers([name], context(run_dir))
    for step in (1, 2, 3):
        first.log(record(step, 0.25))
    first.close()
    second = open_loggers([name], context(run_dir, resume_step=1))
    second.log(record(2, 0.75))
    second.close()


def test_tensorboard_drops_the_steps_that_a_resume_makes_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_with_a_resume("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {"train/reward_mean", "seconds/update"}
    assert [(e.step, e.value) for e in events.Scalars("train/reward_mean")] == [(1, 0.25), (2, 0.75)]


def test_mlflow_goes_on_in_the_same_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    log_with_a_resume("mlflow", tmp_path)
    client = mlflow.MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert len(runs) == 1 and runs[0].data.params["batch.steps"] == "3"
    assert runs[0].data.metrics["train/reward_mean"] == 0.25
    assert [m.value for m in client.get_metric_history(runs[0].info.run_id, "train/reward_mean")] == [
        0.25,
        0.25,
        0.75,
        0.25,
    ]


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_a_hosted_service_keeps_its_run_id_over_a_resume(name, tmp_path, monkeypatch):
    pytest.importorskip(name)
    monkeypatch.setenv(f"{name.upper()}_MODE", "offline")
    log_with_a_resume(name, tmp_path)
    run_id = (tmp_path / f"{name}.id").read_text().strip()
    assert (
        len(
            [
                folder
                for folder, _, _ in os.walk(tmp_path / name)
                if run_id in folder and Path(folder).name.count("run-")
            ]
        )
        == 2
    )


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab"])
def test_a_missing_package_is_said_before_the_run(name, tmp_path):
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    with pytest.raises(UserError) as caught:
        open_loggers([name], context(tmp_path))
    assert f"pip install {name}" in caught.value.fix
    assert not list(tmp_path.iterdir())


def test_an_unknown_logger_gets_the_nearest_name(tmp_path):
    with pytest.raises(UserError, match="did you mean tensorboard"):
        open_loggers(["tensorbord"], context(tmp_path))


def test_a_new_logger_is_one_registration(tmp_path):
    class Listing:
        def __init__(self, given: LoggerContext) -> None:
            self.steps, self.closed = [], False

        def log(self, given: dict) -> None:
            self.steps.append(given["step"])

        def close(self) -> None:
            self.closed = True

    made = []

    @register_logger("listing")
    def build(given: LoggerContext) -> Listing:
        made.append(Listing(given))
        return made[-1]

    @register_logger("broken")
    def fail(given: LoggerContext) -> Listing:
        raise UserError("no key")

    try:
        loggers = open_loggers(["listing", "listing"], context(tmp_path))
        loggers.log(record(4, 1.0))
        loggers.close()
        assert len(made) == 1 and made[0].steps == [4] and made[0].closed
        with pytest.raises(UserError, match="no key"):
            open_loggers(["listing", "broken"], context(tmp_path))
        assert made[1].closed
    finally:
        del LOGGERS["listing"], LOGGERS["broken"]
