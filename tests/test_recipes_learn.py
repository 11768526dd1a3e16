"""Recipes learn the quickstart's lesson: half an hour on two cores, so only on request (``make test-slow``)."""

from pathlib import Path

import pytest

from bench.learning_curves import learn
from meshloom.config.names import Recipe


@pytest.fixture(scope="module")
def lesson(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs share one warmed model."""
    return tmp_path_factory.mktemp("lesson")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [Recipe.GSPO, Recipe.DAPO, Recipe.PPO])
def test_a_recipe_learns_the_lesson(lesson: Path, recipe: Recipe) -> None:
    accuracy = learn(lesson, recipe, 0, ["batch.steps=40"]).accuracy
    assert accuracy[0] < 0.6
    assert accuracy[40] >= 0.7
