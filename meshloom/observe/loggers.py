"""Loggers besides the run folder's own files: TensorBoard, wandb, MLflow, SwanLab.

Owns: the registry of loggers by name and one small class for each service. Refuses to know: what a metric means. Always
holds: a service's package is imported only when it is asked for, and a missing one is a clear error before the run
begins; a resumed run goes on in the same curves. A new logger is one class with ``register_logger``.
"""

import difflib
import importlib
import importlib.util
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from meshloom.config.errors import UserError
from meshloom.observe.atomic import replace_file


@dataclass(frozen=True, kw_only=True)
class LoggerContext:
    """What a logger is told when it opens.

    Args:
        run_dir: folder of the run; its name is the name of the run.
        project: name for services that have projects.
        settings: resolved settings as plain values.
        resume_step: last step that stays, when the run is resumed; none on a fresh start.
    """

    run_dir: Path
    project: str
    settings: Mapping[str, Any]
    resume_step: int | None = None


class Logger(Protocol):
    """Where metric records go."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Take one metric record."""
        ...

    def close(self) -> None:
        """Bring everything out; nothing is logged after this."""
        ...


LOGGERS: dict[str, Callable[[LoggerContext], Logger]] = {}
"""Loggers by name."""

_PACKAGES: dict[str, tuple[str, str]] = {}
"""The package that a logger needs, and the module that it imports, by the logger's name."""


Factory = TypeVar("Factory", bound=Callable[[LoggerContext], Logger])


def register_logger(
    name: str, *, package: str | None = None, module: str | None = None
) -> Callable[[Factory], Factory]:
    """Make a class, or a function that returns a logger, available under ``name`` in ``logging.loggers``.

    Args:
        name: of the logger, and of what is to be installed for it.
        package: that it needs, as it is imported.
        module: that it imports, if that is not the package itself.
    """

    def register(factory: Factory) -> Factory:
        LOGGERS[name] = factory
        if package is not None:
            _PACKAGES[name] = package, module or package
        return factory

    return register


def check_loggers(names: Sequence[str]) -> None:
    """Check that loggers can be opened; nothing is written.

    Raises:
        UserError: if a name is unknown, or a service's package is not installed.
    """
    look_for_loggers(names)
    for name in names:
        if name in _PACKAGES:
            _package(_PACKAGES[name][1], install=name)


def look_for_loggers(names: Sequence[str]) -> None:
    """Look whether there are such loggers and their packages. Nothing is imported: a package that is there may still fail.

    Raises:
        UserError: if a name is unknown, or a service's package is not installed.
    """
    for name in names:
        if name not in LOGGERS:
            near = difflib.get_close_matches(name, LOGGERS, n=1)
            fix = f"did you mean {near[0]}?" if near else f"there are: {', '.join(sorted(LOGGERS))}"
            raise UserError(f"there is no logger {name!r}", where="logging.loggers", fix=fix)
        if name in _PACKAGES and not _is_installed(package := _PACKAGES[name][0]):
            raise _missing(name, f"No module named {package!r}")


def open_loggers(names: Sequence[str], context: LoggerContext) -> "Loggers":
    """Open loggers by name. Either all of them are open afterwards, or none.

    Raises:
        UserError: as ``check_loggers``.
    """
    check_loggers(names)
    loggers = Loggers()
    try:
        for name in dict.fromkeys(names):
            loggers.add(LOGGERS[name](context))
    except BaseException:
        loggers.close()
        raise
    return loggers


class Loggers:
    """Several loggers as one."""

    def __init__(self) -> None:
        self._loggers: list[Logger] = []

    def add(self, logger: Logger) -> None:
        self._loggers.append(logger)

    def log(self, record: Mapping[str, Any]) -> None:
        for logger in self._loggers:
            logger.log(record)

    def close(self) -> None:
        while self._loggers:
            self._loggers.pop().close()


def flat_values(record: Mapping[str, Any]) -> dict[str, float]:
    """A record's numbers under ``kind/name`` and ``seconds/phase``; numbers that are missing are left out."""
    values = {f"{record['kind']}/{name}": value for name, value in record["metrics"].items()}
    values |= {f"seconds/{phase}": seconds for phase, seconds in record.get("phases", {}).items()}
    return {name: float(value) for name, value in values.items() if value is not None}


@register_logger("tensorboard", package="tensorboard", module="torch.utils.tensorboard")
class TensorBoardLogger:
    """Event files in ``tensorboard/`` of the run folder."""

    def __init__(self, context: LoggerContext) -> None:
        writer = _package("torch.utils.tensorboard", install="tensorboard")
        purge = None if context.resume_step is None else context.resume_step + 1
        self._writer = writer.SummaryWriter(str(context.run_dir / "tensorboard"), purge_step=purge)

    def log(self, record: Mapping[str, Any]) -> None:
        for name, value in flat_values(record).items():
            self._writer.add_scalar(name, value, record["step"], walltime=record["time"])

    def close(self) -> None:
        self._writer.close()


@register_logger("wandb", package="wandb")
class WandbLogger:
    """Weights & Biases. The step is an axis of its own, since wandb's own counter refuses to go back on a resume."""

    def __init__(self, context: LoggerContext) -> None:
        wandb = _package("wandb", install="wandb")
        self._run = wandb.init(
            project=context.project,
            name=context.run_dir.name,
            dir=str(context.run_dir),
            config=dict(context.settings),
            id=_run_id(context, "wandb"),
            resume="allow",
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, record: Mapping[str, Any]) -> None:
        self._run.log({"step": record["step"], **flat_values(record)})

    def close(self) -> None:
        self._run.finish()


@register_logger("mlflow", package="mlflow")
class MlflowLogger:
    """MLflow: the project is the experiment."""

    def __init__(self, context: LoggerContext) -> None:
        mlflow = _package("mlflow", install="mlflow")
        self._client = mlflow.MlflowClient()
        self._metric = mlflow.entities.Metric
        experiment = mlflow.set_experiment(context.project).experiment_id
        known = _stored_id(context, "mlflow") if context.resume_step is not None else None
        self._id = known or self._client.create_run(experiment, run_name=context.run_dir.name).info.run_id
        if known is None:
            _store_id(context, "mlflow", self._id)
            params = [mlflow.entities.Param(key, str(value)[:500]) for key, value in _leaves(context.settings)]
            for start in range(0, len(params), 100):
                self._client.log_batch(self._id, params=params[start : start + 100])

    def log(self, record: Mapping[str, Any]) -> None:
        at = int(record["time"] * 1000)
        metrics = [self._metric(name, value, at, record["step"]) for name, value in flat_values(record).items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


@register_logger("swanlab", package="swanlab")
class SwanLabLogger:
    """SwanLab; its local files go to ``swanlab/`` of the run folder."""

    def __init__(self, context: LoggerContext) -> None:
        swanlab = _package("swanlab", install="swanlab")
        self._run = swanlab.init(
            project=context.project,
            experiment_name=context.run_dir.name,
            logdir=str(context.run_dir / "swanlab"),
            config=dict(context.settings),
            id=_run_id(context, "swanlab"),
            resume="allow",
        )
        self._finish = swanlab.finish

    def log(self, record: Mapping[str, Any]) -> None:
        self._run.log(flat_values(record), step=record["step"])

    def close(self) -> None:
        self._finish()


def _is_installed(package: str) -> bool:
    return sys.modules[package] is not None if package in sys.modules else importlib.util.find_spec(package) is not None


def _package(module: str, *, install: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(install, str(error)) from error


def _missing(install: str, why: str) -> UserError:
    return UserError(
        f"the logger {install} needs a package that is not installed",
        where="logging.loggers",
        why=why,
        fix=f"pip install {install}, or leave {install} out of logging.loggers",
    )


def _run_id(context: LoggerContext, service: str) -> str:
    """The service's id of this run: the stored one on a resume, else a new one."""
    known = _stored_id(context, service) if context.resume_step is not None else None
    run_id = known or uuid.uuid4().hex[:20]
    if known is None:
        _store_id(context, service, run_id)
    return run_id


def _id_file(context: LoggerContext, service: str) -> Path:
    return context.run_dir / f"{service}.id"


def _stored_id(context: LoggerContext, service: str) -> str | None:
    file = _id_file(context, service)
    return file.read_text().strip() if file.exists() else None


def _store_id(context: LoggerContext, service: str, run_id: str) -> None:
    replace_file(_id_file(context, service), [f"{run_id}\n".encode()])


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
