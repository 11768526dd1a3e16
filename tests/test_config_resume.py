"""Which settings may change when a run is continued."""

from pathlib import Path

import pytest

from meshloom.config.errors import UserError
from meshloom.config.load import flatten, load_settings
from meshloom.config.resume import MAY_CHANGE, as_begun, as_decided, contradictions, require_same
from meshloom.config.settings import TrainSettings

REQUIRED = ["run_dir=runs/a", "model.path=models/a", "data.train.files=[a.jsonl]"]


def settings(*overrides: str) -> TrainSettings:
    return load_settings(TrainSettings, None, [*REQUIRED, *overrides])


def test_equal_settings_do_not_contradict() -> None:
    assert contradictions(settings(), settings()) == []
    require_same(settings("seed=3"), settings("seed=3"))


@pytest.mark.parametrize(
    "override",
    [
        "batch.steps=100",
        "batch.epochs=2",
        "run_dir=runs/b",
        "device=cpu",
        "checkpoint.keep_last=9",
        "logging.loggers=[]",
        "validation.every_steps=1",
        "reward.workers=3",
        "batch.tokens_per_microbatch=9999",
        "model.gradient_checkpointing=true",
    ],
)
def test_length_place_watching_and_memory_bounds_may_change(override: str) -> None:
    require_same(settings(), settings(override))


def test_every_contradiction_is_named_with_both_values_and_the_origin() -> None:
    with pytest.raises(UserError) as caught:
        require_same(
            settings("optimizer.lr=1e-5"), settings("optimizer.lr=2e-5", "rollout.max_sequences=8", "batch.steps=5")
        )
    message = str(caught.value)
    assert "optimizer.lr: 1e-05 in the checkpoint, 2e-05 now (override optimizer.lr=2e-5)" in message
    assert "rollout.max_sequences: 512 in the checkpoint, 8 now" in message
    assert "batch.steps" not in message


def test_an_adapter_that_appears_or_goes_contradicts() -> None:
    assert ("model.lora.rank", None, 4) in contradictions(settings(), settings("model.lora.rank=4"))
    assert ("model.lora.rank", 4, None) in contradictions(settings("model.lora.rank=4"), settings())


def test_the_caller_decides_what_may_change() -> None:
    assert contradictions(settings(), settings("seed=1"), {"seed"}) == []
    assert contradictions(settings(), settings("optimizer.lr=1"), {"optimizer.*"}) == []
    assert contradictions(settings(), settings("batch.steps=1"), set()) == [("batch.steps", None, 1)]


def test_what_may_change_exists() -> None:
    """A renamed field would otherwise leave a rule about nothing."""
    paths = [*flatten(settings()), *flatten(settings("environment.reasoning_gym=true"))]
    for allowed in MAY_CHANGE:
        assert any(path == allowed or (allowed.endswith(".*") and path.startswith(allowed[:-1])) for path in paths), (
            allowed
        )


def test_another_name_of_the_same_file_does_not_contradict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    reward = "reward.function=rewards.py:score"
    absolute = [f"model.path={tmp_path}/models/a", f"data.train.files=[{tmp_path}/b/../a.jsonl]"]
    require_same(settings(reward), settings(*absolute, f"reward.function={tmp_path}/rewards.py:score"))
    other = settings(reward, f"data.train.files=[{tmp_path}/b.jsonl]")
    with pytest.raises(UserError, match=r"data\.train\.files: \['a\.jsonl'\] in the checkpoint") as caught:
        require_same(settings(reward), other)
    assert "settings.yaml" in caught.value.fix
    assert contradictions(settings(reward), settings(f"reward.function={tmp_path}/rewards.py:other"))
    assert contradictions(settings(reward), settings())


def test_what_a_run_decided_holds_for_those_that_continue_it_unless_it_is_given_now() -> None:
    for decided in (False, True):
        begun = as_decided(settings(), decided)
        assert begun.model.gradient_checkpointing is decided
        assert as_begun(begun, settings()) == begun
        require_same(begun, settings())
    given = settings("model.gradient_checkpointing=true")
    assert as_begun(as_decided(settings(), False), given) == given
    assert as_decided(given, False) is given
    assert as_begun(settings(), settings()).model.gradient_checkpointing == "auto"
