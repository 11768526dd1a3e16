"""Recipes: what they choose, what beats them, and where it says so."""

import json
from pathlib import Path

import pytest

from meshloom.config.errors import UserError
from meshloom.config.load import dump_yaml, explain, load_settings
from meshloom.config.names import Advantage, KlEstimator, PolicyLoss, Recipe
from meshloom.config.recipes import DECIDED, RECIPES, Same
from meshloom.config.resume import contradictions
from meshloom.config.schema import Keys, schema_json
from meshloom.config.settings import AlgorithmSettings, EvalSettings, TrainSettings
from meshloom.config.verl import translate
from meshloom.from_verl import settings_of
from meshloom.plan.algorithm import algorithm_lines
from meshloom.plan.checks import check_settings

REQUIRED = ["run_dir=r", "model.path=m", "data.train.files=[a.jsonl]"]


def load(*overrides: str, file: Path | None = None) -> TrainSettings:
    return load_settings(TrainSettings, file, [*REQUIRED, *overrides])


def origins(settings: TrainSettings) -> dict[str, str]:
    return {line.path: line.origin for line in explain(settings)}


def written(folder: Path, text: str) -> Path:
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    return folder / "run.yaml"


def test_every_name_has_a_recipe_of_settings_that_are_there() -> None:
    keys = Keys(TrainSettings)
    assert set(RECIPES) == set(Recipe)
    assert all(path in keys for path in DECIDED)
    assert all(
        choice.path in keys for choices in RECIPES.values() for choice in choices.values() if isinstance(choice, Same)
    )


@pytest.mark.parametrize("name", list(Recipe))
def test_a_recipe_is_its_choices_and_reads_back_equal(name: Recipe, tmp_path: Path) -> None:
    settings = load(f"algorithm={name}")
    choices = {path: c.of(512) if isinstance(c, Same) else c for path, c in RECIPES[name].items()}
    one_by_one = [f"{path}={json.dumps(choice)}" for path, choice in choices.items()]
    assert settings == load(f"algorithm.recipe={name}", *one_by_one)
    again = load_settings(TrainSettings, written(tmp_path, dump_yaml(settings)), [])
    assert again == settings
    assert settings.algorithm.advantage in [*Advantage, "gae"]
    assert settings.algorithm.policy_loss in list(PolicyLoss)
    assert settings.algorithm.kl_estimator in list(KlEstimator)


def test_origins_say_what_the_recipe_chose(tmp_path: Path) -> None:
    settings = load("algorithm.clip_low=0.1", file=written(tmp_path, "algorithm: dapo\n"))
    found = origins(settings)
    assert (settings.algorithm.clip_low, settings.algorithm.clip_high) == (0.1, 0.28)
    assert found["algorithm.clip_high"] == "recipe dapo"
    assert found["algorithm.clip_low"] == "override algorithm.clip_low=0.1"
    assert found["algorithm.recipe"] == f"{tmp_path}/run.yaml:1"
    assert found["algorithm.gamma"] == "default"
    lines = {line.name: (line.value, line.source) for line in algorithm_lines(settings)}
    assert lines["clip above"] == ("0.28", "recipe dapo")
    given = ["algorithm.correction={weights: banded, reject: k3, reject_threshold: 0.1}"]
    lines = {line.name: (line.value, line.source) for line in algorithm_lines(load(*given))}
    assert lines["weights of the gap"] == ("banded: 0.5 to 2, by token", f"override {given[0]}")
    assert lines["rejection"] == ("k3 above 0.1, by token", f"override {given[0]}")


def test_a_recipe_may_take_the_value_of_another_setting(tmp_path: Path) -> None:
    text = "algorithm: {recipe: dr_grpo}\nrollout: {max_response_tokens: 77}\n"
    settings = load(file=written(tmp_path, text))
    assert settings.algorithm.reduction_constant == 77
    assert origins(settings)["algorithm.reduction_constant"] == "recipe dr_grpo: rollout.max_response_tokens"


def test_dapo_is_whole_and_each_part_can_be_left_out(tmp_path: Path) -> None:
    """Clip-higher, the mean over tokens, dynamic sampling and the penalty for overlong responses."""
    settings = load("algorithm=dapo", "rollout.max_response_tokens=20480")
    algorithm, overlong = settings.algorithm, settings.reward.overlong
    assert overlong is not None
    assert (overlong.buffer_tokens, overlong.factor) == (4096, 1.0)
    assert origins(settings)["reward.overlong.buffer_tokens"] == "recipe dapo: rollout.max_response_tokens"
    assert (algorithm.clip_high, algorithm.reduction, algorithm.filter_groups.enabled) == (0.28, "token-mean", True)
    parts = load("algorithm=dapo", "reward.overlong=null", "algorithm.filter_groups.enabled=false")
    assert (parts.reward.overlong, parts.algorithm.filter_groups.enabled) == (None, False)
    file = written(tmp_path, "reward: {overlong: {buffer_tokens: 9}}\n")
    for name in ("dapo", "gspo"):
        kept = load(f"algorithm={name}", file=file).reward.overlong
        assert kept is not None and kept.buffer_tokens == 9


@pytest.mark.parametrize("name", list(Recipe))
def test_the_plan_has_nothing_against_a_recipe(name: Recipe) -> None:
    found = check_settings(load(f"algorithm={name}", "reward.function=exact_match"), None)
    told = {problem.code for problem in (*found.problems, *found.warnings) if problem.code.startswith("A")}
    has_estimator = RECIPES[name]["algorithm.advantage"] in list(Advantage)
    assert told == (set() if has_estimator else {"A002"})


@pytest.mark.parametrize(
    "order", [("algorithm=dapo", "algorithm.clip_high=0.3"), ("algorithm.clip_high=0.3", "algorithm=dapo")]
)
def test_overrides_beat_the_recipe_in_any_order(order: tuple[str, str]) -> None:
    settings = load(*order)
    assert (settings.algorithm.clip_high, settings.algorithm.recipe) == (0.3, Recipe.DAPO)


@pytest.mark.parametrize("override", ["algorithm=gspo", "algorithm.recipe=gspo"])
def test_a_recipe_that_an_override_names_beats_the_file(override: str, tmp_path: Path) -> None:
    """Otherwise a recipe on top of a run's settings.yaml, which says everything, would change nothing but the name."""
    text = "algorithm: {advantage: rloo, clip_high: 0.5, gamma: 0.9, entropy_coefficient: 0.01, kl: loss}\n"
    settings = load(override, "algorithm.clip_low=0.2", file=written(tmp_path, text))
    algorithm = settings.algorithm
    assert (algorithm.advantage, algorithm.policy_loss, algorithm.clip_high, algorithm.gamma) == (
        "grpo",
        "gspo",
        4e-4,
        1.0,
    )
    assert (algorithm.kl, algorithm.clip_low, algorithm.entropy_coefficient) == ("none", 0.2, 0.01)


def test_in_a_file_what_is_given_beats_the_recipe(tmp_path: Path) -> None:
    settings = load(file=written(tmp_path, "algorithm:\n  clip_high: 0.5\n  recipe: dapo\n"))
    assert (settings.algorithm.clip_high, settings.algorithm.reduction) == (0.5, "token-mean")


def test_the_last_recipe_counts(tmp_path: Path) -> None:
    settings = load("algorithm=gspo", "algorithm=gpg", file=written(tmp_path, "algorithm: dapo\n"))
    assert settings == load("algorithm=gpg")


@pytest.mark.parametrize("given", ["algorithm=dappo", "algorithm.recipe=dappo", "algorithm=3"])
def test_an_unknown_recipe_is_refused_with_those_there_are(given: str) -> None:
    with pytest.raises(UserError) as error:
        load(given)
    assert ("change: did you mean dppo or dapo? expected: one of ppo" in str(error.value)) == ("dappo" in given)
    assert given in str(error.value) and "recipe" in str(error.value)


@pytest.mark.parametrize("value", ["null", "abc", "true"])
def test_what_a_recipe_would_follow_is_refused_as_what_it_is(value: str) -> None:
    """It used to end in a traceback."""
    with pytest.raises(UserError, match="rollout.max_response_tokens cannot be"):
        load("algorithm=dapo", f"rollout.max_response_tokens={value}")


def test_no_recipe_is_the_defaults_and_an_evaluation_has_none(tmp_path: Path) -> None:
    assert load().algorithm == AlgorithmSettings()
    with pytest.raises(UserError, match="there is no key 'algorithm'"):
        load_settings(
            EvalSettings, written(tmp_path, "algorithm: dapo\n"), ["run_dir=r", "model.path=m", "data.train.files=[a]"]
        )


def test_a_run_may_be_resumed_with_its_choices_under_another_name() -> None:
    dapo = load("algorithm=dapo")
    choices = {path: c.of(512) if isinstance(c, Same) else c for path, c in RECIPES[Recipe.DAPO].items()}
    by_hand = load(*[f"{path}={json.dumps(choice)}" for path, choice in choices.items()])
    assert contradictions(dapo, by_hand) == []
    assert contradictions(dapo, load("algorithm=gspo")) != []


def test_a_recipe_takes_the_place_of_what_a_verl_command_says() -> None:
    words = ["python3", "-m", "verl.trainer.main_ppo", "actor_rollout_ref.actor.clip_ratio_high=0.5"]
    settings = settings_of(translate(words), ["algorithm=dapo", "data.train.files=[a.jsonl]"])
    assert (settings.algorithm.advantage, settings.algorithm.clip_high) == ("grpo", 0.28)
    assert origins(settings)["algorithm.clip_high"] == "recipe dapo"


def test_editors_accept_a_name_or_a_group() -> None:
    algorithm = json.loads(schema_json(TrainSettings))["properties"]["algorithm"]
    names, group = algorithm["anyOf"]
    assert "dapo" in names["enum"]
    assert group["$ref"].endswith("AlgorithmSettings")
