"""``meshloom quickstart``: the whole way on a small problem, from nothing to a model that learned.

Owns: the order of the lesson: make problems and a model, warm it with examples, train it against the verifier, show what
happened. Refuses to know: how any of it works; each stage is the command a user would type. Always holds: what is done is
not done again, so the same command goes on with a lesson that was stopped.
"""

from pathlib import Path

from rich.console import Console

from meshloom.config.errors import UserError
from meshloom.config.load import load_settings
from meshloom.config.settings import SftSettings, TrainSettings
from meshloom.lesson.model import build_model
from meshloom.lesson.problems import write_problems
from meshloom.lesson.settings import GRPO_FILE, SFT_FILE, write_settings
from meshloom.loop.sft import run_sft
from meshloom.loop.train import run_training
from meshloom.observe.records import read_metrics
from meshloom.observe.report import write_report
from meshloom.observe.run_folder import SETTINGS_FILE, RunState, read_status
from meshloom.observe.summary import print_summary
from meshloom.train.export import export_model

GOAL = 0.9
NUM_EXAMPLES, NUM_TRAIN = 6000, 6000


def run_quickstart(directory: Path, seed: int, model: Path | None) -> int:
    """Run the lesson, or go on with it.

    Args:
        directory: folder of the lesson: empty, not there, or of this lesson when it was stopped.
        seed: of problems, weights and sampling.
        model: a pretrained folder to learn the lesson instead of the small model.

    Returns:
        0 if the goal is reached (or ``model`` is given), 1 if not, 130 if stopped.

    Raises:
        UserError: if the folder holds something else.
    """
    console = Console()
    root = directory.resolve()
    if code := warm_up(root, seed, model):
        return _stopped(console, code)
    console.print(f"2/2  reinforcement learning against the verifier ({root / GRPO_FILE})", highlight=False)
    grpo = load_settings(TrainSettings, root / GRPO_FILE)
    code = 0 if _finished(grpo.run_dir) else run_training(grpo, resume=_begun(grpo.run_dir))
    if code:
        return _stopped(console, code)
    stages = {"warm-up": root / "sft", "grpo": root / "grpo"}
    write_report(root, stages=stages, title="meshloom quickstart")
    print_summary(root, stages=stages)
    reached = last_accuracy(root / "grpo")
    if model is None and reached < GOAL:
        console.print(f"the lesson's goal of {GOAL:.0%} was not reached: {reached:.1%}", highlight=False)
        return 1
    return 0


def warm_up(root: Path, seed: int, model: Path | None) -> int:
    """The lesson up to the model that guesses, in ``root / "warm"``, and the settings to train it.

    Returns:
        0, or 130 if stopped.

    Raises:
        UserError: if the folder holds something else.
    """
    _prepare(root, seed, model)
    text = f"1/2  warm-up: supervised fine-tuning on examples ({root / SFT_FILE})"
    Console().print(text, highlight=False)
    sft = load_settings(SftSettings, root / SFT_FILE)
    code = 0 if _finished(sft.run_dir) else run_sft(sft, resume=_begun(sft.run_dir))
    if not code and not (root / "warm").is_dir():
        export_model(root / "sft", root / "warm")
    return code


def _prepare(root: Path, seed: int, model: Path | None) -> None:
    """Make problems, model and settings; the settings last, so that a folder that has them has everything."""
    if (root / GRPO_FILE).is_file():
        settings = load_settings(TrainSettings, root / GRPO_FILE)
        if settings.seed != seed:
            raise UserError(
                f"{root} is the lesson of seed {settings.seed}, not {seed}",
                where="--seed",
                fix="another --dir or --seed",
            )
        return
    if root.exists() and any(root.iterdir()):
        raise UserError(f"{root} is not empty", where="--dir", fix=f"another --dir, or remove it: rm -r {root}")
    root.mkdir(parents=True, exist_ok=True)
    data = write_problems(root / "data", seed=seed, num_examples=NUM_EXAMPLES, num_train=NUM_TRAIN)
    base = model.resolve() if model is not None else build_model(root / "base", data.examples, seed=seed)
    write_settings(root, base=base, warm=root / "warm", data=data, seed=seed, small=model is None)


def _begun(run_dir: str) -> bool:
    return (Path(run_dir) / SETTINGS_FILE).is_file()


def _finished(run_dir: str) -> bool:
    return _begun(run_dir) and read_status(run_dir)["state"] == RunState.FINISHED


def _stopped(console: Console, code: int) -> int:
    console.print("the same quickstart command goes on with the lesson", highlight=False)
    return code


def last_accuracy(run_dir: Path) -> float:
    """Accuracy of a run's last validation."""
    found = [record["metrics"]["accuracy"] for record in read_metrics(run_dir) if record["kind"] == "validation"]
    return found[-1]
