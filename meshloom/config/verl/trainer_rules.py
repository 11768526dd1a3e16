"""verl's ``trainer`` keys: length of the run, checkpoints, validation, loggers, folder.

Owns: their meaning here. Always holds: the last step is saved, and evaluated, where verl does that: in reinforcement
learning if others are, in fine-tuning always.
"""

from meshloom.config.verl.sheet import Sheet

ALL_CHECKPOINTS = 1_000_000
"""More checkpoints than a run writes: verl keeps all of them by default."""
EACH_EPOCH = "after_each_epoch"
"""verl's word in place of a number of steps, in fine-tuning alone."""
_LOGGERS = ("tensorboard", "wandb", "mlflow", "swanlab")


def trainer_rules(sheet: Sheet, steps_of_epoch: int | None = None) -> None:
    """Everything under ``trainer`` that one loop reads, but for devices.

    Args:
        steps_of_epoch: of fine-tuning, as far as known.
    """
    _length(sheet)
    folder = "trainer.default_local_dir"
    names = () if folder in sheet.given.entries else ("trainer.project_name", "trainer.experiment_name")
    sheet.set("run_dir", resolved_folder(sheet), folder, *names)
    sheet.set("logging.project", sheet.text("trainer.project_name"), "trainer.project_name")
    sheet.ignore("a run is told apart by its folder", "trainer.experiment_name")
    _loggers(sheet)
    _checkpoints(sheet, steps_of_epoch)
    _validation(sheet, steps_of_epoch)
    _loop(sheet)


def resolved_folder(sheet: Sheet) -> str:
    """The run's folder, with the names in verl's default put in."""
    folder = sheet.text("trainer.default_local_dir")
    for name in ("project_name", "experiment_name"):
        folder = folder.replace(f"${{trainer.{name}}}", sheet.text(f"trainer.{name}"))
    return folder


def _length(sheet: Sheet) -> None:
    steps, epochs = "trainer.total_training_steps", "trainer.total_epochs"
    sheet.set("batch.epochs", sheet.whole(epochs), epochs)
    sheet.set("batch.steps", sheet.whole(steps), steps)
    if sheet.has(steps) and epochs in sheet.given.entries:
        sheet.warn(steps, "the run has these steps; verl ends earlier where the epochs end earlier")


def _loggers(sheet: Sheet) -> None:
    key = "trainer.logger"
    names = sheet.texts(key)
    sheet.set("logging.loggers", [name for name in names if name in _LOGGERS], key)
    unknown = [name for name in names if name not in (*_LOGGERS, "console", "file")]
    if unknown:
        text = (
            f"there is no logger {' or '.join(unknown)}; metrics are in the run's folder, or use {', '.join(_LOGGERS)}"
        )
        sheet.warn(key, text)


def _checkpoints(sheet: Sheet, steps_of_epoch: int | None) -> None:
    is_sft, saves = "algorithm.gamma" not in sheet.defaults, "trainer.save_freq"
    every = _every(sheet, "checkpoint.every_steps", saves, steps_of_epoch, "saved")
    sheet.set("checkpoint.at_end", is_sft or every > 0, saves)
    if not (is_sft or every):
        sheet.warn(saves, "nothing is saved, as in verl; checkpoint.at_end=true saves the last step")
    key, one = "trainer.max_actor_ckpt_to_keep", "trainer.remove_previous_ckpt_in_save"
    key = "trainer.max_ckpt_to_keep" if "trainer.max_ckpt_to_keep" in sheet.defaults else key
    most = 1 if sheet.flag(one) else sheet.whole(key)
    sheet.set("checkpoint.keep_last", most if most and most > 0 else ALL_CHECKPOINTS, key, one)
    sheet.set("checkpoint.keep_best", 0)
    group = "checkpoint" if is_sft else "actor_rollout_ref.actor.checkpoint"
    sheet.set("checkpoint.asynchronous", sheet.flag(f"{group}.async_save"), f"{group}.async_save")
    reason = "a checkpoint holds everything that a run goes on from; `meshloom export` writes a Hugging Face folder"
    names = [key for key in sheet.open() if key.startswith(f"{group}.")]
    sheet.ignore(reason, *names)
    _resume(sheet)


def _every(sheet: Sheet, path: str, key: str, steps_of_epoch: int | None, done: str) -> int:
    """Steps between what is done now and then, 0 for never; fine-tuning may say each epoch."""
    if "algorithm.gamma" not in sheet.defaults and sheet.value(key) == EACH_EPOCH:
        every = steps_of_epoch
        if every is None:
            sheet.warn(key, f"how many steps an epoch has is not known, so only the last step is {done}; set {path}")
    else:
        every = sheet.whole(key)
    steps = max(0, every or 0)
    sheet.set(path, steps, key)
    return steps


def _resume(sheet: Sheet) -> None:
    mode, path = "trainer.resume_mode", "trainer.resume_from_path"
    choice = sheet.text(mode)
    if choice not in ("auto", "disable", "resume_path"):
        sheet.refuse(mode, f"{choice!r} is none of auto, disable, resume_path")
    if choice == "resume_path":
        text = "a run goes on in its own folder: set trainer.default_local_dir to it and resume_mode to auto"
        sheet.refuse(mode, text)
    sheet.count("--resume, if the run's folder holds a run", *([mode] if choice == "auto" else []))
    sheet.ignore("the run begins anew, in a folder that holds no run", mode)
    sheet.ignore("a run goes on from the newest checkpoint in its own folder", path, "trainer.resume_path")


def _validation(sheet: Sheet, steps_of_epoch: int | None) -> None:
    is_sft, tests = "algorithm.gamma" not in sheet.defaults, "trainer.test_freq"
    every = _every(sheet, "validation.every_steps", tests, steps_of_epoch, "evaluated")
    sheet.set("validation.after_training", is_sft or every > 0, tests)
    if "trainer.val_before_train" in sheet.defaults:
        sheet.set("validation.before_training", sheet.flag("trainer.val_before_train"), "trainer.val_before_train")
    if sheet.flag("trainer.val_only"):
        sheet.refuse("trainer.val_only", "a run trains; `meshloom eval` evaluates without")
    sheet.ignore("the run trains", "trainer.val_only")


def _loop(sheet: Sheet) -> None:
    mode = "trainer.v1.trainer_mode"
    if sheet.text(mode, "sync") not in ("sync", "colocate_sync"):
        text = "generation and training take turns; samples are never older than the weights"
        sheet.refuse(mode, f"{text}; set it to sync")
    sheet.ignore("generation and training take turns", mode)
    remote = "trainer.default_hdfs_dir"
    if sheet.has(remote):
        sheet.refuse(
            remote, "checkpoints are written to trainer.default_local_dir; copy them from there, set it to null"
        )
    sheet.ignore("checkpoints are in the run's folder", remote)
    callback = "trainer.checkpoint_callback_class"
    if sheet.has(callback):
        sheet.refuse(callback, "no code of your own is called at checkpoints; set it to null")
    sheet.ignore("there is none", callback)


def steps_of_epoch(sheet: Sheet, num_rows: int | None) -> int | None:
    """Steps of one pass over the rows, if they can be counted."""
    return None if num_rows is None else num_rows // (sheet.whole("data.train_batch_size") or 1)


def known_steps(sheet: Sheet, num_prompts: int | None) -> int | None:
    """Steps of the whole run, if they are given or can be counted.

    Args:
        sheet: of the translation.
        num_prompts: rows of the training data; none if not known.
    """
    steps = sheet.whole("trainer.total_training_steps")
    if steps is not None or num_prompts is None:
        return steps
    return (steps_of_epoch(sheet, num_prompts) or 0) * (sheet.whole("trainer.total_epochs") or 1)
