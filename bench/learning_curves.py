"""Curves of recipes on the quickstart's lesson: ``python -m bench.learning_curves dapo gspo ppo --dir runs/curves``.

One warm-up, then one run of each recipe with the lesson's settings, changed by nothing but ``algorithm=NAME``. Writes the
accuracy on held-out problems and the mean reward of every step to ``docs/learning-curves.svg`` and prints a table. What is done
is not done again, so the same command goes on with runs that were stopped. A run takes some minutes on two cores.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshloom.config.load import load_settings
from meshloom.config.names import Recipe
from meshloom.config.settings import TrainSettings
from meshloom.lesson.settings import GRPO_FILE
from meshloom.loop.quickstart import warm_up
from meshloom.loop.train import run_training
from meshloom.observe.markup import el, join
from meshloom.observe.records import read_metrics
from meshloom.observe.run_folder import SETTINGS_FILE, RunState, read_status

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "learning-curves.svg"
COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b83280", "#4a5568")
WIDTH, HEIGHT, LEFT, TOP, GAP, MARGIN = 760, 300, 44, 34, 60, 12
CRITIC = ("critic.optimizer.lr=5e-4", "critic.warmup_steps=5")
"""What a recipe with a critic needs on this lesson beside its name: a head that is new learns faster than the model."""


@dataclass(frozen=True)
class Curve:
    """What a run learned: accuracy by validation step, mean reward by step."""

    accuracy: Mapping[int, float]
    reward: Mapping[int, float]

    @classmethod
    def of(cls, run_dir: Path) -> "Curve":
        """Of a run's records."""
        records = read_metrics(run_dir)
        found = {
            kind: {record["step"]: record["metrics"] for record in records if record["kind"] == kind}
            for kind in ("validation", "train")
        }
        return cls(
            accuracy={step: metrics["accuracy"] for step, metrics in found["validation"].items()},
            reward={
                step: metrics["reward_mean"] for step, metrics in found["train"].items() if "reward_mean" in metrics
            },
        )


def learn(root: Path, recipe: Recipe, seed: int, more: Sequence[str] = ()) -> Curve:
    """Train the lesson's warmed model by a recipe, or go on with it.

    Raises:
        SystemExit: if the run is stopped.
    """
    if code := warm_up(root, seed, None):
        raise SystemExit(code)
    changes = [f"run_dir={root / recipe}", f"algorithm={recipe}", *(CRITIC if recipe is Recipe.PPO else ()), *more]
    settings = load_settings(TrainSettings, root / GRPO_FILE, changes)
    begun = (Path(settings.run_dir) / SETTINGS_FILE).is_file()
    finished = begun and read_status(settings.run_dir)["state"] == RunState.FINISHED
    if not finished and (code := run_training(settings, resume=begun)):
        raise SystemExit(code)
    return Curve.of(Path(settings.run_dir))


def drawn(curves: Mapping[str, Curve]) -> str:
    """Both charts as SVG."""
    panel = (WIDTH - LEFT - GAP - MARGIN) // 2
    accuracy = {name: curve.accuracy for name, curve in curves.items()}
    reward = {name: curve.reward for name, curve in curves.items()}
    legend = [
        el("text", name, x=LEFT + 90 * index, y=HEIGHT - 6, fill=COLOURS[index % len(COLOURS)])
        for index, name in enumerate(curves)
    ]
    markup = el(
        "svg",
        el("rect", width=WIDTH, height=HEIGHT, fill="#ffffff"),
        _chart("accuracy on held-out problems", accuracy, LEFT, panel),
        _chart("mean reward of a step", reward, LEFT + panel + GAP, panel),
        legend,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        font_family="sans-serif",
        font_size=12,
    )
    return str(markup) + "\n"


def _chart(title: str, lines: Mapping[str, Mapping[int, float]], left: int, width: int) -> object:
    height, last = HEIGHT - TOP - 50, max(max(line) for line in lines.values())

    def place(step: int, value: float) -> str:
        return f"{left + width * step / last:.1f},{TOP + height * (1 - min(max(value, 0.0), 1.0)):.1f}"

    grid = [
        [
            el(
                "line",
                x1=left,
                x2=left + width,
                y1=TOP + height * (1 - at),
                y2=TOP + height * (1 - at),
                stroke="#e2e8f0",
            ),
            el("text", f"{at:.0%}", x=left - 6, y=TOP + height * (1 - at) + 4, text_anchor="end", fill="#718096"),
        ]
        for at in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    paths = [
        el(
            "polyline",
            points=" ".join(place(step, value) for step, value in sorted(line.items())),
            fill="none",
            stroke=COLOURS[index % len(COLOURS)],
            stroke_width=2,
        )
        for index, line in enumerate(lines.values())
    ]
    steps = el("text", f"step {last}", x=left + width, y=TOP + height + 18, text_anchor="end", fill="#718096")
    return join([el("text", title, x=left, y=TOP - 12, fill="#1a202c"), grid, paths, steps])


def main() -> None:
    """Learn, draw, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", type=Recipe)
    parser.add_argument("--dir", type=Path, default=Path("runs/curves"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="fewer than the lesson's")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    given = parser.parse_args()
    more = [] if given.steps is None else [f"batch.steps={given.steps}"]
    curves = {str(recipe): learn(given.dir.resolve(), recipe, given.seed, more) for recipe in given.recipes}
    given.picture.write_text(drawn(curves), encoding="utf-8")
    for name, curve in curves.items():
        shown = ", ".join(f"{step}: {value:.1%}" for step, value in sorted(curve.accuracy.items()))
        print(f"{name:12} accuracy by step: {shown}")
    print(f"the curves: {given.picture}")


if __name__ == "__main__":
    main()
