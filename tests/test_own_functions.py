"""Advantages, losses and divergences in files of the user's own: the documented example, and what is refused before a run."""

import re
from pathlib import Path

import pytest
import torch

from meshloom.algorithms import ADVANTAGES, KL_ESTIMATORS, POLICY_LOSSES, AdvantageInputs, PolicyInputs
from meshloom.algorithms.own_checks import check_own
from meshloom.config.errors import RunFault, UserError
from meshloom.config.load import load_settings
from meshloom.config.settings import AlgorithmSettings, TrainSettings
from meshloom.loop.train import run_training
from meshloom.observe.records import read_metrics
from meshloom.plan.checks import check_settings
from tests.algorithm_batches import SETTINGS, random_tokens
from tests.lesson_runs import train_settings, write_inputs

DOCS = Path(__file__).parents[1] / "docs" / "algorithms.md"
COPIES = """\
from meshloom.algorithms.advantages import grpo
from meshloom.algorithms.policy_losses import ppo


def k3(logprob_T, reference_logprob_T, mask_T):
    delta_T = (logprob_T - reference_logprob_T).clamp(-20.0, 20.0)
    return ((-delta_T).exp() + delta_T - 1.0).clamp(-10.0, 10.0)
"""
BRIEF = ("batch.steps=2", "data.validation=null", "algorithm.kl=loss")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def file_of(folder: Path, text: str, name: str = "mine.py") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def algorithm(*given: str) -> AlgorithmSettings:
    return settings(*given).algorithm


def settings(*given: str) -> TrainSettings:
    required = ["run_dir=r", "model.path=m", "data.train.reasoning_gym=basic_arithmetic"]
    return load_settings(TrainSettings, None, [*required, *given])


def last_model(run_dir: Path) -> bytes:
    return (sorted((run_dir / "checkpoints").glob("step-*"))[-1] / "model" / "model.safetensors").read_bytes()


def own(file: Path, **functions: str) -> list[str]:
    return [f"algorithm.{key}={file}:{function}" for key, function in functions.items()]


def test_the_documented_example_trains(inputs: Path, tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(# mine\.py\n.*?)```", DOCS.read_text(encoding="utf-8"), re.S)
    mine = file_of(tmp_path, example)
    chosen = own(mine, advantage="median_baseline", policy_loss="clipped_above", kl_estimator="absolute")
    assert run_training(train_settings(inputs, tmp_path / "run", *BRIEF, *chosen), resume=False) == 0
    steps = [record["metrics"] for record in read_metrics(tmp_path / "run") if record["kind"] == "train"]
    assert len(steps) == 2
    assert all(step["grad_norm"] > 0 and step["kl_reference"] >= 0 for step in steps)


def test_a_copy_of_what_is_built_in_gives_the_same_run(inputs: Path, tmp_path: Path) -> None:
    mine = file_of(tmp_path, COPIES)
    chosen = own(mine, advantage="grpo", policy_loss="ppo", kl_estimator="k3")
    for name, changes in (("built_in", []), ("own", chosen)):
        assert run_training(train_settings(inputs, tmp_path / name, *BRIEF, *changes), resume=False) == 0
    assert last_model(tmp_path / "own") == last_model(tmp_path / "built_in")


@pytest.mark.slow
def test_each_process_of_a_run_over_devices_loads_the_file(inputs: Path, tmp_path: Path) -> None:
    chosen = own(file_of(tmp_path, COPIES), advantage="grpo", policy_loss="ppo", kl_estimator="k3")
    two = ("cluster.devices_per_node=2",)
    for name, changes in (("built_in", []), ("own", chosen)):
        assert run_training(train_settings(inputs, tmp_path / name, *BRIEF, *two, *changes), resume=False) == 0
    assert last_model(tmp_path / "own") == last_model(tmp_path / "built_in")


FAULTS = [
    ("advantage", "def f(rewards, groups): ...", "other arguments"),
    ("advantage", "def f(batch): return batch.reward_S", "shape (7,) for advantages"),
    ("advantage", "def f(batch): return batch.of_samples(batch.reward_S).long()", "int64 for advantages"),
    (
        "advantage",
        "def f(batch): return batch.of_samples(batch.reward_S / batch.groups.std(batch.reward_S))",
        "NaN or inf",
    ),
    ("advantage", "def f(batch): return 0.5", "float for advantages"),
    ("advantage", "def f(batch): return batch.values()", "needs values_T"),
    ("policy_loss", "def f(inputs, settings): return (inputs.advantages_T * inputs.logprob_T).mean()", "shape ()"),
    ("policy_loss", "def f(inputs, settings): return inputs.advantages_T", "no gradient"),
    ("policy_loss", "def f(inputs, settings): return 0 * inputs.logprob_T", "0 everywhere"),
    (
        "policy_loss",
        "def f(inputs, settings): return -(inputs.advantages_T - inputs.advantages_T.mean()) * inputs.logprob_T",
        "depends on the samples beside it",
    ),
    ("policy_loss", "def f(inputs, settings): return inputs.nothing", "AttributeError"),
    ("kl_estimator", "def f(logprob_T, reference_logprob_T): return logprob_T", "other arguments"),
    ("kl_estimator", "def f(logprob_T, reference_logprob_T, mask_T): return logprob_T.detach()", "no gradient"),
    ("kl_estimator", "f = 3", "is no function"),
    ("advantage", "import nothing_of_this_name\ndef f(batch): ...", "ModuleNotFoundError"),
]


@pytest.mark.parametrize(("key", "source", "told"), FAULTS, ids=[f"{key}-{told}" for key, _, told in FAULTS])
def test_what_cannot_be_used_is_refused_before_the_run(tmp_path: Path, key: str, source: str, told: str) -> None:
    mine = file_of(tmp_path, source + "\n")
    with pytest.raises(UserError) as error:
        check_own(algorithm("algorithm.kl=loss", *own(mine, **{key: "f"})))
    assert told in str(error.value)
    assert f"algorithm.{key}={mine}:f" in str(error.value) or f"algorithm.{key}" in str(error.value)


def test_a_run_with_a_function_that_cannot_be_used_leaves_no_folder(inputs: Path, tmp_path: Path) -> None:
    mine = file_of(tmp_path, "def f(batch): return None\n")
    with pytest.raises(UserError, match="NoneType for advantages"):
        run_training(train_settings(inputs, tmp_path / "run", *BRIEF, *own(mine, advantage="f")), resume=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("gone.py:f", "there is no file gone.py"),
        ("{mine}:g", "no function or class 'g'"),
        ("mine.txt:f", "not of the form"),
        ("{bad}:f", "is not Python"),
    ],
)
def test_the_plan_refuses_files_and_functions_that_are_not_there(tmp_path: Path, name: str, told: str) -> None:
    mine, bad = file_of(tmp_path, "def f(batch): ...\n"), file_of(tmp_path, "def f(:\n", "bad.py")
    found = check_settings(settings(f"algorithm.policy_loss={name.format(mine=mine, bad=bad)}"), None)
    assert [(problem.code, told in problem.what) for problem in found.problems] == [("A027", True)]
    assert check_settings(settings(f"algorithm.policy_loss={mine}:f"), None).problems == []


def test_a_misspelt_function_is_told_with_the_nearest(tmp_path: Path) -> None:
    mine = file_of(tmp_path, "def median_baseline(batch): ...\n")
    (problem,) = check_settings(settings(f"algorithm.advantage={mine}:medain_baseline"), None).problems
    assert (problem.why, problem.fix) == ("it has: median_baseline", f"did you mean {mine}:median_baseline?")


LATE = """\
def inner(batch):
    return batch.nothing

def raises(batch):
    return inner(batch)

def none(batch):
    return None

def nan(batch):
    return batch.of_samples(batch.reward_S * float("nan"))

def loss(inputs, settings):
    return inputs.logprob_T.sum()

def kl(logprob_T, reference_logprob_T, mask_T):
    return [1, 2]
"""


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("raises", ["raises AttributeError in the run", "in raises", "return inner(batch)", "return batch.nothing"]),
        ("none", ["gives NoneType for advantages, not a tensor", "it returned None"]),
        ("nan", ["gives NaN or infinity for advantages", "it returned tensor([nan"]),
        ("loss", ["the shape () for losses, on", "it returned tensor("]),
        ("kl", ["gives list for divergences, not a tensor", "it returned [1, 2]"]),
    ],
)
def test_a_function_that_fails_in_a_run_is_told_by_its_own_lines(
    tmp_path: Path, function: str, told: list[str]
) -> None:
    """What was shown was the program's traceback, or a shape that does not fit somewhere in it."""
    mine, tokens = file_of(tmp_path, LATE), random_tokens(0)
    inputs = AdvantageInputs(
        token_rewards_T=tokens.advantages_T,
        mask_T=tokens.mask_T,
        lengths_S=tokens.lengths_S,
        group_S=torch.zeros(len(tokens.lengths_S), dtype=torch.int64),
    )
    with pytest.raises(RunFault) as error:
        if function == "loss":
            POLICY_LOSSES.find(f"{mine}:loss")(tokens.inputs(tokens.logprob_T), SETTINGS)
        elif function == "kl":
            KL_ESTIMATORS.find(f"{mine}:kl")(tokens.logprob_T, tokens.reference_logprob_T, tokens.mask_T)
        else:
            ADVANTAGES.find(f"{mine}:{function}")(inputs)
    said = str(error.value)
    assert all(words in said for words in [*told, f"{mine}:{function}", "change: def f("]), said
    assert "meshloom/algorithms" not in said and said.count("File ") == (2 if function == "raises" else 0)


def test_own_functions_never_see_what_stands_outside_the_mask(tmp_path: Path) -> None:
    source = """\
    import torch
    def loss(inputs, settings):
        assert torch.isfinite(inputs.logprob_T).all() and inputs.correction_weights_T is None
        return -inputs.advantages_T * inputs.logprob_T
    def kl(logprob_T, reference_logprob_T, mask_T):
        assert torch.isfinite(logprob_T).all() and torch.isfinite(reference_logprob_T).all()
        return logprob_T - reference_logprob_T + 1
    def advantage(batch):
        return batch.of_samples(batch.reward_S)
    """
    mine = file_of(tmp_path, "\n".join(line[4:] for line in source.splitlines()) + "\n")
    tokens = random_tokens(0)
    nan_T = torch.where(tokens.mask_T, tokens.logprob_T, float("nan"))
    found = POLICY_LOSSES.find(f"{mine}:loss")(tokens.inputs(nan_T), SETTINGS)
    built_in = POLICY_LOSSES.find("gpg")(tokens.inputs(tokens.logprob_T), SETTINGS)
    torch.testing.assert_close(found.per_token_T, built_in.per_token_T)
    kl_T = KL_ESTIMATORS.find(f"{mine}:kl")(nan_T, tokens.reference_logprob_T, tokens.mask_T)
    assert bool((kl_T[~tokens.mask_T] == 0).all())
    outputs = ADVANTAGES.find(f"{mine}:advantage")(
        AdvantageInputs(
            token_rewards_T=tokens.advantages_T,
            mask_T=tokens.mask_T,
            lengths_S=tokens.lengths_S,
            group_S=torch.zeros(len(tokens.lengths_S), dtype=torch.int64),
        )
    )
    assert bool((outputs.advantages_T[~tokens.mask_T] == 0).all())
    assert isinstance(tokens.inputs(nan_T), PolicyInputs)


def test_a_file_that_has_changed_is_told_on_resume(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = file_of(tmp_path, COPIES)
    chosen = own(mine, policy_loss="ppo")
    assert run_training(train_settings(inputs, tmp_path / "run", *BRIEF, *chosen, "batch.steps=1"), resume=False) == 0
    mine.write_text(COPIES + "\n# another\n")
    assert run_training(train_settings(inputs, tmp_path / "run", *BRIEF, *chosen), resume=True) == 0
    assert "the file of algorithm.policy_loss changed since the checkpoint" in capsys.readouterr().out
