"""``meshloom quickstart``: the whole way on a small problem, from nothing to a model that learned.

Owns: the order of the lesson: make problems and a model, warm it with worked solutions, train it against the verifier, show
what happened. Refuses to know: how any of it works; each stage is the command a user would type.
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
from meshloom.observe.summary import print_summary
from meshloom.train.export import export_model

GOAL = 0.9
NUM_EXAMPLES, NUM_TRAIN = 6000, 6000


def run_quickstart(directory: Path, seed: int, model: Path | None) -> int:
    """Run the lesson.

    Args:
        directory: folder of the lesson; must be empty or not there.
        seed: of problems, weights and sampling.
        model: a pretrained folder to learn the lesson instead of the small model.

    Returns:
        0 if the goal is reached (or ``model`` is given), 1 if not, 130 if stopped.

    Raises:
        UserError: if the folder holds something.
    """
    if directory.exists() and any(directory.iterdir()):
        raise UserError(
            f"{directory} is not empty", where="--dir", fix=f"another --dir, or remove it: rm -r {directory}"
        )
    directory.mkdir(parents=True, exist_ok=True)
    console = Console()
    root = directory.resolve()
    warm = root / "warm"
    data = write_problems(root / "data", seed=seed, num_examples=NUM_EXAMPLES, num_train=NUM_TRAIN)
    base = model.resolve() if model is not None else build_model(root / "base", data.examples, seed=seed)
    write_settings(root, base=base, warm=warm, data=data, seed=seed, small=model is None)
    console.print(f"1/2  warm-up: supervised fine-tuning on examples ({SFT_FILE})", highlight=False)
    code = run_sft(load_settings(SftSettings, root / SFT_FILE), resume=False)
    if code:
        return code
    export_model(root / "sft", warm)
    console.print(f"2/2  reinforcement learning against the verifier ({GRPO_FILE})", highlight=False)
    code = run_training(load_settings(TrainSettings, root / GRPO_FILE), resume=False)
    stages = {"warm-up": root / "sft", "grpo": root / "grpo"}
    write_report(root, stages=stages, title="meshloom quickstart")
    print_summary(root, stages=stages)
    if code:
        return code
    reached = last_accuracy(root / "grpo")
    if model is None and reached < GOAL:
        console.print(f"the lesson's goal of {GOAL:.0%} was not reached: {reached:.1%}", highlight=False)
        return 1
    return 0


def last_accuracy(run_dir: Path) -> float:
    """Accuracy of a run's last validation."""
    found = [record["metrics"]["accuracy"] for record in read_metrics(run_dir) if record["kind"] == "validation"]
    return found[-1]
