"""What a run shows while it runs and when it ends."""

import io
import re

import pytest
from rich.console import Console

from meshloom.config.settings import SftSettings, TrainSettings
from meshloom.observe.display import open_display, sparkline
from meshloom.observe.report import write_report
from meshloom.observe.run_folder import RunFolder, RunState
from meshloom.observe.summary import print_summary


def train(step: int, reward: float = 0.5) -> dict:
    metrics = {"reward_mean": reward, "solved_share": reward, "response_tokens_mean": 40.0, "sampler_gap": None}
    return {
        "step": step,
        "kind": "train",
        "metrics": metrics,
        "phases": {"generate": 1.5, "update": 0.5},
        "time": 1e9 + 2 * step,
    }


def validation(step: int, accuracy: float) -> dict:
    metrics = {"accuracy": accuracy, "accuracy_low": accuracy - 0.05, "accuracy_high": accuracy + 0.05}
    return {
        "step": step,
        "kind": "validation",
        "metrics": metrics,
        "phases": {"validate": 1.0},
        "time": 1e9 + 2 * step + 1,
    }


def test_off_a_terminal_each_record_is_one_line_without_escapes():
    out = io.StringIO()
    with open_display("run", steps=3, console=Console(file=out, width=40)) as display:
        display.phase("generate")
        display.record(validation(0, 0.25))
        display.record(train(1))
        display.record({"step": 2, "kind": "sft", "metrics": {"loss": 0.125, "unheard_of": 1.0}, "time": 1e9})
        display.notice("stopping [after] this step")
    lines = out.getvalue().splitlines()
    assert len(lines) == 5 and "\x1b" not in out.getvalue()
    assert lines[1] == "step 0/3  validation  accuracy 25.0 % (20.0 % – 30.0 %)  1.0 s"
    assert lines[2].startswith("step 1/3  reward 0.5  solved 50.0 %  tokens 40  2.0 s")
    assert "loss 0.125" in lines[3]
    assert lines[4] == "stopping [after] this step"


def test_the_live_table_shows_the_last_steps_the_phase_and_the_accuracy():
    out = io.StringIO()
    console = Console(file=out, width=120, height=40, force_terminal=True, color_system=None)
    with open_display("run", steps=50, console=console) as display:
        display.record(validation(0, 0.25))
        for step in range(1, 31):
            display.record(train(step, step / 30))
        display.record(validation(30, 0.75))
        display.notice("stopping [after] this step")
        display.phase("update")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    last = text[text.rindex("step ") :]
    assert [int(n) for n in re.findall(r"^\s+(\d+) ", last, re.M)] == list(range(21, 31))
    assert "30/50" in last and "█" in last
    assert "25.0 % → 75.0 %" in text and "stopping [after] this step" in text


@pytest.mark.parametrize("width", [16, 30, 60])
def test_a_narrow_terminal_shows_fewer_columns_and_each_number_whole(width):
    """All columns used to be squeezed until none of their numbers could be read."""
    out = io.StringIO()
    console = Console(file=out, width=width, height=40, force_terminal=True, color_system=None)
    with open_display("run", steps=50, console=console) as display:
        display.record(train(1, 0.8125))
        display.record(validation(1, 0.25))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "…" not in text
    last = text[text.rindex(" step ") :].splitlines()
    assert set(last[0].split()) <= {
        "step",
        "reward",
        "solved",
        "accuracy",
        "tokens",
        "entropy",
        "gap",
        "grad",
        "seconds",
    }
    assert ("81.2 %" in last[1], "25.0 %" in last[1]) == (width >= 30, width >= 60)


def drawn(out: io.StringIO) -> str:
    """What was drawn, without the terminal's codes."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())


def terminal(out: io.StringIO) -> Console:
    return Console(file=out, width=120, height=40, force_terminal=True, color_system=None)


def test_a_run_with_a_reference_and_a_critic_shows_both():
    """A step in which the critic learns alone had no number of it, and the divergence was in the files only."""
    given = train(1)
    given["metrics"] |= {"kl_reference": 0.0125, "explained_variance": 0.25}
    out, screen = io.StringIO(), io.StringIO()
    with (
        open_display("run", steps=3, console=Console(file=out)) as lines,
        open_display("run", steps=3, console=terminal(screen)) as table,
    ):
        for display in (lines, table):
            display.record(given)
    assert "tokens 40  kl 0.0125  explained 25.0 %  2.0 s" in out.getvalue()
    text = drawn(screen)
    assert text[text.rindex(" step ") :].splitlines()[0].split()[-3:] == ["seconds", "kl", "explained"]


def test_invalid_rewards_show_in_the_line_and_in_the_table():
    """A run whose reward function failed for some samples looked like one in which it did not."""
    given = train(1)
    given["metrics"] |= {"samples": 32, "reward_invalid": 5.0, "reward_invalid/raised": 5.0}
    mixed = train(2)
    mixed["metrics"] |= {"reward_invalid": 3.0, "reward_invalid/died": 1.0, "reward_invalid/deadline": 2.0}
    out, screen = io.StringIO(), io.StringIO()
    with (
        open_display("run", steps=3, console=Console(file=out)) as lines,
        open_display("run", steps=3, console=terminal(screen)) as table,
    ):
        for display in (lines, table):
            display.record(given)
            display.record(mixed)
            display.record(train(3) | {"metrics": {"reward_invalid": 0.0, "samples": 32, "reward_mean": 0.5}})
    first, second, third = out.getvalue().splitlines()[1:]
    assert "invalid 5 of 32 (raised)" in first and "invalid 3 (mostly deadline)" in second and "invalid" not in third
    text = drawn(screen)
    last = text[text.rindex(" step ") :].splitlines()
    assert last[0].split()[:2] == ["step", "invalid"]
    assert "5 of 32 (raised)" in last[1] and "3 (mostly deadline)" in last[2]


def test_the_table_has_no_column_without_a_value():
    """Supervised runs had a column for an accuracy that they never measure."""
    out = io.StringIO()
    with open_display("run", steps=3, console=terminal(out)) as display:
        display.record({"step": 1, "kind": "sft", "metrics": {"loss": 0.5, "grad_norm": None}, "time": 1e9})
    text = drawn(out)
    assert text[text.rindex(" step ") :].splitlines()[0].split() == ["step", "loss", "seconds"]


def test_a_resumed_run_says_where_it_started_and_goes_on_with_its_table():
    """On a terminal nothing told a resumed run from a new one, and the accuracy before training was lost."""
    out = io.StringIO()
    earlier = [validation(0, 0.25), *(train(step, step / 20) for step in range(1, 16))]
    with open_display("run", steps=60, first_step=15, earlier=earlier, console=terminal(out)) as display:
        display.record(train(16, 0.8))
        display.record(validation(16, 0.75))
    text = drawn(out)
    assert text.splitlines()[0].strip() == "run: 60 steps, 15 done"
    last = text[text.rindex("   accuracy ") :]
    assert "25.0 % → 75.0 %" in last and "16/60" in last
    assert [int(n) for n in re.findall(r"^\s+(\d+) ", last, re.M)] == list(range(7, 17))
    assert len(re.search(r"reward ([▁▂▃▄▅▆▇█]+)", last)[1]) == 16


def test_a_sparkline_goes_from_the_lowest_to_the_highest():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3, 3]) == "▁▁"
    assert sparkline([]) == ""
    assert len(sparkline(list(range(100)), width=20)) == 20


def test_the_summary_tells_the_result_the_time_samples_and_places(tmp_path):
    with RunFolder.create(tmp_path / "run") as run:
        for record in (validation(0, 0.25), train(1, 0.25), train(2, 0.75), validation(2, 0.75)):
            run.log_metrics(record)
        common = {"kind": "train", "row": 0, "group": 0, "prompt": "1 + 1?", "answer": "2"}
        run.log_samples([common | {"step": 1, "response": "earlier", "reward": 0.0}])
        run.log_samples([common | {"step": 2, "response": "two \x1b[31m[bold]", "reward": 1.0}])
        run.log_samples([common | {"step": 2, "response": "hm", "reward": None, "invalid": "deadline"}])
        run.set_status(RunState.FINISHED, step=2, steps=2)
    out = io.StringIO()
    print_summary(tmp_path / "run", console=Console(file=out, width=100))
    text = out.getvalue()
    assert "25.0 % (20.0 – 30.0 %) → 75.0 % (70.0 – 80.0 %)" in text
    assert "finished  2 steps" in text
    assert re.search(r"Generate\s+3\.0 s\s+50\.0 %", text)
    assert "[bold]" in text and "\x1b" not in text and "earlier" not in text
    assert "invalid: deadline" in text
    assert str(tmp_path / "run" / "samples.jsonl") in text
    assert f"meshloom export {tmp_path / 'run'} OUT" not in text, "a folder without settings is no run to export"


def test_the_summary_keeps_the_stages_apart_and_ends_with_what_comes_next(tmp_path):
    """The times of both stages were added up under the last one's name, and text broke at 80 columns off a terminal."""
    base = {"model": {"path": "m"}, "data": {"train": {"files": ["t.jsonl"]}}}
    sft = SftSettings.model_validate(base | {"run_dir": str(tmp_path / "sft")})
    grpo = TrainSettings.model_validate(base | {"run_dir": str(tmp_path / "grpo")})
    with RunFolder.create(tmp_path / "sft", settings=sft) as run:
        for step in (1, 2):
            run.log_metrics(train(step) | {"kind": "sft", "metrics": {"loss": 1 / step}, "phases": {"update": 30.0}})
        run.set_status(RunState.FINISHED, step=2, steps=2)
    with RunFolder.create(tmp_path / "grpo", settings=grpo) as run:
        for record in (validation(0, 0.25), train(1, 0.25), train(2, 0.75), validation(2, 0.75)):
            run.log_metrics(record | {"metrics": record["metrics"] | {"loss": -0.5}})
        run.set_status(RunState.FINISHED, step=2, steps=2)
    stages = {"warm-up": tmp_path / "sft", "grpo": tmp_path / "grpo"}
    write_report(tmp_path, stages=stages)
    out = io.StringIO()
    print_summary(tmp_path, stages=stages, console=Console(file=out))
    text = out.getvalue()
    lines = text.splitlines()
    assert "warm-up  finished  2 steps in 32.0 s" in lines and "grpo  finished  2 steps in 5.0 s" in lines
    warm_up, after = text.split("Where the time went: warm-up")[1].split("Where the time went: grpo")
    assert re.search(r"Update\s+1 min 00 s\s+100\.0 %", warm_up)
    assert re.search(r"Update\s+1\.0 s\s+16\.7 %", after)
    assert "loss" not in text and any(line.endswith("held-out, 95 % interval") for line in lines)
    assert "Validation is greedy (" in text and "training samples at temperature 1," in text
    following = lines[lines.index("Next") + 1 :]
    assert [line.split("  ", 2)[-1].strip() for line in following] == [
        f"open {tmp_path}/report.html in a browser",
        f"meshloom export {tmp_path}/grpo OUT",
        f"meshloom train {tmp_path}/grpo/settings.yaml batch.steps=4 --resume",
        "see README.md",
    ]
