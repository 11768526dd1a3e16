"""The lesson's problems, examples and model; and, on request, that it learns, and does not learn from nothing."""

import json
from pathlib import Path

import pytest
import reasoning_gym
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshloom.config.load import load_settings
from meshloom.config.settings import EvalSettings, SftSettings, TrainSettings
from meshloom.lesson.model import build_model
from meshloom.lesson.problems import GUESSED_SHARE, NUM_HELD_OUT, TASK, LessonData, write_problems
from meshloom.lesson.settings import GRPO_FILE, SFT_FILE, write_settings
from meshloom.loop.evaluate import evaluate
from meshloom.loop.quickstart import last_accuracy, run_quickstart
from meshloom.loop.train import run_training
from meshloom.plan.build import build_plan
from meshloom.train.export import export_model


@pytest.fixture(scope="module")
def lesson(tmp_path_factory: pytest.TempPathFactory) -> LessonData:
    return write_problems(tmp_path_factory.mktemp("lesson") / "data", seed=3, num_examples=800, num_train=600)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_no_problem_is_in_two_sets(lesson: LessonData) -> None:
    sets = [[row["prompt"][0]["content"] for row in rows(f)] for f in (lesson.examples, lesson.train, lesson.held_out)]
    assert [len(s) for s in sets] == [800, 600, NUM_HELD_OUT]
    together = [question for s in sets for question in s]
    assert len(set(together)) == len(together)


def test_worked_examples_are_right_and_guesses_sometimes(lesson: LessonData) -> None:
    """Judged by reasoning-gym itself, on the text between the tags."""
    judge = reasoning_gym.create_dataset("chain_sum", size=1, seed=0, **TASK)
    worked, guessed = [], []
    for row in rows(lesson.examples):
        answer = reasoning_gym.utils.extract_answer(row["response"])
        entry = {
            "question": "",
            "answer": row["reward_model"]["ground_truth"],
            "metadata": row["extra_info"]["metadata"],
        }
        kind = guessed if row["response"].startswith("<answer>") else worked
        kind.append(judge.score_answer(answer, entry) == 1.0)
    assert all(worked)
    assert 0.35 < sum(guessed) / len(guessed) < 0.5
    assert abs(len(guessed) / 800 - GUESSED_SHARE) < 0.06


def test_the_same_seed_makes_the_same_lesson_and_another_seed_another(lesson: LessonData, tmp_path: Path) -> None:
    again = write_problems(tmp_path / "again", seed=3, num_examples=800, num_train=600)
    other = write_problems(tmp_path / "other", seed=4, num_examples=800, num_train=600)
    assert again.examples.read_text() == lesson.examples.read_text()
    assert other.held_out.read_text() != lesson.held_out.read_text()


def test_the_model_is_an_ordinary_folder(lesson: LessonData, tmp_path: Path) -> None:
    folder = build_model(tmp_path / "base", lesson.examples, seed=0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == "qwen3"
    assert model.config.vocab_size == len(tokenizer)
    text = "3+4=7 <answer>-85</answer> Größe 你好 \n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = [{"role": "user", "content": "1 + 2"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == "<|im_start|>user\n1 + 2<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("small", [True, False])
def test_the_settings_that_are_written_can_run(lesson: LessonData, tmp_path: Path, small: bool) -> None:
    base = build_model(tmp_path / "base", lesson.examples, seed=0)
    write_settings(tmp_path, base=base, warm=base, data=lesson, seed=0, small=small)
    for kind, file in ((SftSettings, SFT_FILE), (TrainSettings, GRPO_FILE)):
        plan = build_plan(load_settings(kind, tmp_path / file), 600)
        assert not plan.problems


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_lesson_is_learned(tmp_path: Path, seed: int) -> None:
    assert run_quickstart(tmp_path / "lesson", seed, None) == 0
    assert last_accuracy(tmp_path / "lesson" / "grpo") >= 0.9


@pytest.mark.slow
def test_nothing_is_learned_from_rewards_that_say_nothing(tmp_path: Path) -> None:
    """The control: with the same run and rewards that do not depend on the answer, accuracy does not rise."""
    root = tmp_path / "lesson"
    assert run_quickstart(root, 0, None) == 0
    reward = tmp_path / "coin.py"
    reward.write_text(
        "import zlib\n\n\ndef score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(zlib.crc32((extra_info['question'] + solution_str).encode()) % 2)\n"
    )
    overrides = [f"reward.function={reward}:score", f"run_dir={tmp_path / 'control'}", "batch.steps=40"]
    # Validation during this run asks the coin too, so the trained model is judged by an evaluation.
    settings = load_settings(TrainSettings, root / GRPO_FILE, overrides)
    assert run_training(settings, resume=False) == 0
    folder = export_model(tmp_path / "control", tmp_path / "model")
    values = [
        f"run_dir={tmp_path / 'eval'}",
        f"model.path={folder}",
        f"data.train.files=[{root / 'data' / 'held_out.jsonl'}]",
        "rollout.max_response_tokens=40",
    ]
    assert evaluate(load_settings(EvalSettings, None, values), Console())["accuracy"] < 0.6
