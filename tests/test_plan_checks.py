"""Rules across settings: what is refused, what is warned about, and the nearest values that work."""

from pathlib import Path

import pytest

from meshloom.config.errors import UserError
from meshloom.config.load import dump_yaml, load_settings
from meshloom.config.names import GREEDY_ADVANTAGES, VALUE_ADVANTAGES, Advantage
from meshloom.config.problems import Problem
from meshloom.config.settings import EvalSettings, SftSettings, TrainSettings
from meshloom.plan import build_plan
from meshloom.plan.checks import Findings, check_settings, divisors_around
from meshloom.plan.group_checks import check_groups

DATA = "data.train.reasoning_gym=basic_arithmetic"


def settings(kind: type, *overrides: str, data: str = DATA):
    return load_settings(kind, None, ["run_dir=runs/a", "model.path=models/a", data, *overrides])


def only(problems: list[Problem]) -> Problem:
    assert len(problems) == 1, [str(problem) for problem in problems]
    return problems[0]


@pytest.mark.parametrize("kind", [TrainSettings, SftSettings, EvalSettings])
def test_defaults_are_neither_refused_nor_warned_about(kind: type) -> None:
    found = check_settings(settings(kind), 1000)
    assert (found.problems, found.warnings) == ([], [])


@pytest.mark.parametrize(
    ("step", "update", "fixes"),
    [
        (64, 24, ["prompts_per_update=16 or 32", "prompts_per_step=48 or 72"]),
        (60, 7, ["prompts_per_update=6 or 10", "prompts_per_step=56 or 63"]),
        (8, 12, ["prompts_per_update=8", "prompts_per_step=12"]),
    ],
)
def test_an_update_must_divide_a_step(step: int, update: int, fixes: list[str]) -> None:
    given = settings(TrainSettings, f"batch.prompts_per_step={step}", f"batch.prompts_per_update={update}")
    problem = only(check_settings(given, 1000).problems)
    assert problem.code == "B001"
    assert all(fix in problem.fix for fix in fixes)
    assert f"override batch.prompts_per_update={update}" in problem.where


def test_the_nearest_divisors_are_divisors() -> None:
    for number in range(1, 60):
        for near in range(1, 70):
            around = divisors_around(number, near)
            assert all(number % d == 0 for d in around)
            assert not any(number % d == 0 for d in range(around[0] + 1, near + 1))


@pytest.mark.parametrize(
    ("kind", "response"), [(TrainSettings, "rollout.max_response_tokens"), (SftSettings, "data.max_response_tokens")]
)
def test_the_longest_sample_must_fit_a_microbatch(kind: type, response: str) -> None:
    limits = ["data.max_prompt_tokens=100", f"{response}=200"]
    assert check_settings(settings(kind, *limits, "batch.tokens_per_microbatch=300"), 1000).problems == []
    problem = only(check_settings(settings(kind, *limits, "batch.tokens_per_microbatch=299"), 1000).problems)
    assert problem.code == "B002"
    assert "300 tokens" in problem.what
    assert "299" in problem.what
    assert problem.fix == f"batch.tokens_per_microbatch=300, or {response}=199, or data.max_prompt_tokens=99"


@pytest.mark.parametrize(
    ("code", "overrides", "said"),
    [
        ("A001", ["algorithm.advantage=gpro"], "did you mean grpo?"),
        ("A003", ["algorithm.policy_loss=pppo"], "did you mean ppo?"),
        ("A004", ["algorithm.kl_estimator=k4"], "k1, abs, k2, k3, k1+, abs+, k2+, k3+"),
        ("A005", ["algorithm.reduction=seq-mean-token-sum-norm"], "needs algorithm.reduction_constant"),
        ("R001", ["rollout.sampling.temperature=0"], "greedy"),
        ("R003", ["rollout.sampling.top_k=1"], "greedy"),
        ("R003", ["rollout.sampling.min_p=1"], "greedy"),
        ("S007", ["reward.function=exact_matc"], "did you mean exact_match?"),
        ("S006", ["reward.function=nowhere/mine.py:score"], "there is no file nowhere/mine.py"),
    ],
)
def test_what_cannot_work_is_refused(code: str, overrides: list[str], said: str) -> None:
    problem = only(check_settings(settings(TrainSettings, *overrides), 1000).problems)
    assert problem.code == code
    assert said in str(problem)
    assert overrides[0] in problem.where or code == "A005"


@pytest.mark.parametrize(
    ("code", "overrides"),
    [
        ("A006", ["algorithm.reduction_constant=5"]),
        ("A007", ["batch.samples_per_prompt=1"]),
        ("A008", ["algorithm.kl=loss", "algorithm.kl_coefficient=0"]),
        ("A009", ["algorithm.kl_coefficient=0.1"]),
        ("S005", ["data.chat_template=never", "data.chat_template_arguments.enable_thinking=false"]),
        ("A012", ["algorithm.max_lag_versions=1", "batch.prompts_per_update=32"]),
        ("A010", ["algorithm.policy_loss=gspo", "algorithm.reduction=token-sum"]),
        ("R002", ["validation.samples_per_prompt=8"]),
        ("R004", ["rollout.sampling.top_p=0.9"]),
        ("R004", ["rollout.sampling.top_k=50"]),
        ("R004", ["rollout.sampling.min_p=0.05"]),
        ("R005", ["rollout.ignore_eos=true"]),
        ("B003", ["batch.prompts_per_step=1001"]),
        ("O001", ["batch.steps=5", "optimizer.warmup_updates=6"]),
        ("O002", ["optimizer.lr=0"]),
        ("O003", ["optimizer.min_lr_ratio=0.5"]),
        ("O004", ["optimizer.lr=0.1"]),
        ("L001", ["model.lora.dropout=0.1"]),
        ("S004", ["data.train.split=test"]),
        ("S005", ["data.system_prompt=Hello", "data.chat_template=never"]),
    ],
)
def test_what_is_likely_not_meant_is_warned_about(code: str, overrides: list[str]) -> None:
    found = check_settings(settings(TrainSettings, *overrides), 1000)
    assert found.problems == []
    assert only(found.warnings).code == code


def test_a_single_sample_is_fine_where_no_group_is_compared() -> None:
    given = settings(TrainSettings, "batch.samples_per_prompt=1", "algorithm.advantage=reinforce_plus_plus")
    assert check_settings(given, 1000).warnings == []


def test_a_source_is_exactly_one() -> None:
    none = only(check_settings(settings(TrainSettings, data="data.train={}"), None).problems)
    assert (none.code, "none is given" in none.what) == ("S001", True)
    both = only(check_settings(settings(TrainSettings, "data.train.dataset=gsm8k"), None).problems)
    assert "both dataset and reasoning_gym are given" in both.what


def test_missing_data_files_are_named_with_those_nearby(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are relative to the current directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "rows.csv").write_text("a\n")
    assert check_settings(settings(TrainSettings, data="data.train.files=[train.jsonl]"), None).problems == []
    found = check_settings(settings(TrainSettings, data="data.train.files=[trian.jsonl, rows.csv, no/a.jsonl]"), None)
    assert [problem.code for problem in found.problems] == ["S002", "S003", "S002"]
    assert found.problems[0].fix == "files nearby: train.jsonl"
    assert f"no folder {tmp_path / 'no'}" in found.problems[2].fix


def test_everything_is_told_at_once() -> None:
    given = settings(
        TrainSettings, "algorithm.advantage=gpro", "batch.prompts_per_update=5", "rollout.sampling.temperature=0"
    )
    plan = build_plan(given, 1000)
    with pytest.raises(UserError) as caught:
        plan.require()
    message = str(caught.value)
    for code in ("A001", "B001", "R001", "M001"):
        assert f"[{code}]" in message
    assert "train runs/a: 4 problems" in message


def test_settings_that_were_written_out_whole_bring_no_new_warnings(tmp_path: Path) -> None:
    """A warning about a value without effect looks at the value, not at whether it was written."""
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(settings(TrainSettings)))
    assert check_settings(load_settings(TrainSettings, file, []), 1000).warnings == []


def test_the_accepted_names_are_those_of_the_algorithms_and_verifiers() -> None:
    from meshloom.algorithms import ADVANTAGES, KL_ESTIMATORS, POLICY_LOSSES
    from meshloom.config.names import FIXED_REDUCTIONS, KlEstimator, PolicyLoss, Verifier
    from meshloom.rewards.verifiers import VERIFIERS

    assert set(map(str, Advantage)) == set(ADVANTAGES)
    assert {name for name in ADVANTAGES if ADVANTAGES[name].needs_greedy} == GREEDY_ADVANTAGES
    assert {name for name in ADVANTAGES if ADVANTAGES[name].needs_values} == VALUE_ADVANTAGES
    assert set(map(str, PolicyLoss)) == set(POLICY_LOSSES)
    assert set(map(str, Verifier)) == set(VERIFIERS)
    synonyms = {name + plus for name in ("kl", "mse", "low_var_kl") for plus in ("", "+")}
    assert set(map(str, KlEstimator)) == set(KL_ESTIMATORS) - synonyms
    fixed = {name: loss.reduction for name, loss in POLICY_LOSSES.items() if loss.reduction is not None}
    assert fixed == {str(name): reduction for name, reduction in FIXED_REDUCTIONS.items()}


@pytest.mark.parametrize(
    ("code", "overrides"),
    [
        ("A030", ["algorithm.filter_groups.enabled=true", "batch.samples_per_prompt=1"]),
        ("A031", ["algorithm.filter_groups.enabled=true", "algorithm.advantage=reinforce_plus_plus"]),
        ("A032", ["algorithm.filter_groups.max_rounds=3"]),
    ],
)
def test_dynamic_sampling_that_cannot_work_is_refused_and_what_is_not_meant_is_told(
    code: str, overrides: list[str]
) -> None:
    found = Findings(given := settings(TrainSettings, *overrides))
    check_groups(found, given)
    problem = only([*found.problems, *found.warnings])
    assert problem.code == code
    assert bool(found.problems) == (code == "A030")


def test_a_horizon_of_a_fifth_of_a_step_is_refused() -> None:
    """The weight of the divergence used to turn 0 or negative, and never came back."""
    adaptive = ["algorithm.kl=reward", "algorithm.kl_control=adaptive", "batch.samples_per_prompt=8"]
    at = settings(TrainSettings, *adaptive, "batch.prompts_per_step=64", "algorithm.kl_horizon=102.4")
    problem = only(check_settings(at, 1000).problems)
    assert (problem.code, problem.suggestions) == ("A028", (("algorithm.kl_horizon=5120",),))
    above = settings(TrainSettings, *adaptive, "batch.prompts_per_step=64", "algorithm.kl_horizon=103")
    assert check_settings(above, 1000).problems == []


def test_a_run_that_keeps_nothing_of_what_it_learns_is_warned_about() -> None:
    for kind in (TrainSettings, SftSettings):
        warning = only(
            check_settings(settings(kind, "checkpoint.at_end=false", "checkpoint.every_steps=0"), 1000).warnings
        )
        assert warning.code == "H001" and "checkpoint.at_end=true" in warning.fix
        assert not check_settings(settings(kind, "checkpoint.at_end=false"), 1000).warnings
