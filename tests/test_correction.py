"""The correction of what sampler and trainer disagree on, and the weight of the divergence, in whole steps and runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshloom.algorithms.kl import AdaptiveKl
from meshloom.config.load import load_settings
from meshloom.config.settings import AlgorithmSettings, TrainSettings
from meshloom.loop.correction import learned, rejection_metrics, with_kept
from meshloom.loop.objective import PolicyObjective, update_metrics
from meshloom.loop.train import run_training
from meshloom.observe.records import read_metrics
from meshloom.samples import Samples
from tests.algorithm_batches import random_tokens
from tests.lesson_runs import assert_same_run, train_settings, write_inputs

VERSION = 7


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def algorithm(*given: str) -> AlgorithmSettings:
    required = ["run_dir=r", "model.path=m", "data.train.files=[a.jsonl]"]
    return load_settings(TrainSettings, None, [*required, *given]).algorithm


def batch(seed: int = 0) -> tuple[Samples, torch.Tensor]:
    """Samples as a step has them, and log-probs of the weights that learn."""
    tokens = random_tokens(seed)
    count, total = len(tokens.lengths_S), len(tokens.mask_T)
    valid = torch.ones(count, dtype=torch.bool)
    valid[3] = False
    made = Samples(
        lengths=tokens.lengths_S,
        tokens={
            "mask": tokens.mask_T,
            "old_logprob": tokens.old_logprob_T,
            "sampler_logprob": tokens.reference_logprob_T,
            "advantages": tokens.advantages_T,
            "version": torch.full((total,), VERSION, dtype=torch.int32),
        },
        rows={"valid": valid},
    )
    return made, tokens.logprob_T


def objective_of(
    samples: Samples, logprob_T: torch.Tensor, settings: AlgorithmSettings
) -> tuple[float, torch.Tensor, dict[str, Any]]:
    """The loss of an update, its gradient, and what was measured; the update is cut after the fifth sample."""
    update = learned(with_kept(samples, settings.correction))
    objective = PolicyObjective.of(update, settings, VERSION)
    leaf_T, reports = logprob_T.clone().requires_grad_(), []
    cut = int(samples.lengths[:5].sum())
    for part, logs_T in zip(update.split([5, len(update) - 5]), (leaf_T[:cut], leaf_T[cut:]), strict=True):
        parts = objective(part, logs_T, torch.zeros_like(logs_T))
        parts.total.backward()
        reports.append({"loss": parts.total.detach(), **parts.stats})
    together = {name: reports[0][name] + reports[1][name] for name in reports[0]}
    assert leaf_T.grad is not None
    return float(together["loss"]), leaf_T.grad, together


def test_rejected_tokens_are_in_no_denominator() -> None:
    samples, logprob_T = batch()
    plain = ("algorithm.policy_loss=gpg", "algorithm.correction.reject=k1")
    settings = algorithm(*plain, "algorithm.correction.reject_threshold=0.4")
    gap_T = (samples["old_logprob"] - samples["sampler_logprob"]).abs()
    own_T = samples["mask"] & torch.repeat_interleave(samples["valid"], samples.lengths)
    takes_part_T = own_T & (gap_T <= 0.4)
    assert 0 < takes_part_T.sum() < own_T.sum()
    loss, gradient_T, report = objective_of(samples, logprob_T, settings)
    expected = -(samples["advantages"] * logprob_T)[takes_part_T].sum() / takes_part_T.sum()
    assert loss == pytest.approx(float(expected))
    assert bool((gradient_T[~takes_part_T] == 0).all())
    rejected = rejection_metrics(with_kept(samples, settings.correction))["rejected_share"]
    assert rejected == pytest.approx(1 - float(takes_part_T.sum() / own_T.sum()))
    assert float(report["gap"].num_tokens) == float(own_T.sum())


def test_a_loss_with_its_own_reduction_leaves_that_of_the_divergence() -> None:
    """The divergence was reduced as the loss is defined, and not as the settings say (and verl does)."""
    samples, logprob_T = batch()
    reference_T = samples["old_logprob"] - 0.3
    samples = replace(samples, tokens={**samples.tokens, "reference_logprob": reference_T})
    plain = ("algorithm.policy_loss=gspo", "algorithm.kl_estimator=k2", "algorithm.reduction=token-mean")
    loss, _, report = objective_of(
        samples, logprob_T, algorithm(*plain, "algorithm.kl=loss", "algorithm.kl_coefficient=0.5")
    )
    takes_part_T = samples["mask"] & torch.repeat_interleave(samples["valid"], samples.lengths)
    divergence = (0.5 * (logprob_T - reference_T).square())[takes_part_T].mean()
    assert loss - float(report["policy_loss"]) == pytest.approx(0.5 * float(divergence), rel=1e-9)


def test_samples_are_rejected_whole_and_do_not_count_as_samples() -> None:
    samples, logprob_T = batch()
    given = ("algorithm.reduction=seq-mean-token-mean", "algorithm.policy_loss=gpg")
    reject = ("algorithm.correction.reject=k3", "algorithm.correction.reject_level=sequence-max")
    kept = with_kept(samples, algorithm(*reject, "algorithm.correction.reject_threshold=0.2").correction)
    for sample in kept:
        own = sample["mask"]
        assert bool(sample["kept"][own].all()) or not bool(sample["kept"][own].any())
    settings = algorithm(*given, *reject, "algorithm.correction.reject_threshold=0.2")
    loss, _, _ = objective_of(samples, logprob_T, settings)
    own_T = learned(kept)["mask"]
    means = [
        float(-(sample["advantages"] * logs)[own].mean())
        for sample, logs, own in zip(
            samples, logprob_T.split(samples.lengths.tolist()), own_T.split(samples.lengths.tolist()), strict=True
        )
        if bool(own.any())
    ]
    assert 0 < len(means) < len(samples)
    assert loss == pytest.approx(sum(means) / len(means))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("weights", ["truncated", "banded"])
def test_weights_multiply_the_loss_of_each_token(weights: str, level: str) -> None:
    samples, logprob_T = batch()
    bounds = ("algorithm.correction.threshold=1.3", "algorithm.correction.low=0.7")
    chosen = (f"algorithm.correction.weights={weights}", f"algorithm.correction.level={level}")
    settings = algorithm("algorithm.policy_loss=gpg", "algorithm.reduction=token-sum", *bounds, *chosen)
    _, gradient_T, report = objective_of(samples, logprob_T, settings)
    own_T = samples["mask"] & torch.repeat_interleave(samples["valid"], samples.lengths)
    log_T = torch.where(own_T, samples["old_logprob"] - samples["sampler_logprob"], 0.0)
    if level == "sequence":
        log_T = torch.cat([torch.full_like(part, float(part.sum())) for part in log_T.split(samples.lengths.tolist())])
    ratio_T = log_T.exp()
    weight_T = ratio_T.clamp(max=1.3) if weights == "truncated" else ratio_T * ((ratio_T >= 0.7) & (ratio_T <= 1.3))
    torch.testing.assert_close(gradient_T, torch.where(own_T, -samples["advantages"] * weight_T, 0.0))
    summary = report["weights"].summary()
    assert summary["correction_weight"] == pytest.approx(float(weight_T[own_T].mean()))
    assert summary["correction_bounded_share"] == pytest.approx(float((weight_T != ratio_T)[own_T].double().mean()))


def test_the_gap_that_may_stop_a_run_leaves_the_age_of_samples_out() -> None:
    """Tokens of older weights differ by what was learned since; they used to count as disagreement."""
    samples, logprob_T = batch()
    age_T = torch.full_like(samples["version"], VERSION - 2)
    fresh_T = torch.zeros_like(samples["mask"])
    fresh_T[: int(samples.lengths[:3].sum())] = True
    samples = samples.with_tokens(version=torch.where(fresh_T, samples["version"], age_T))
    _, _, report = objective_of(samples, logprob_T, algorithm("algorithm.max_lag_versions=2"))
    gap_T = (samples["old_logprob"] - samples["sampler_logprob"]).abs()
    assert report["fresh_gap"].summary()["mean_abs"] == pytest.approx(float(gap_T[fresh_T & samples["mask"]].mean()))
    own_T = samples["mask"] & torch.repeat_interleave(samples["valid"], samples.lengths)
    metrics = update_metrics([{**report, "policy_loss": report["loss"], "entropy": torch.zeros(())}])
    assert metrics["sampler_gap"] == pytest.approx(float(gap_T[own_T].mean()))
    old = samples.with_tokens(version=age_T)
    assert objective_of(old, logprob_T, algorithm())[2]["fresh_gap"].summary() == {}


def test_to_the_sampler_itself_the_ratio_holds_the_gap() -> None:
    samples, logprob_T = batch()
    bypassed = samples.with_tokens(old_logprob=samples["sampler_logprob"])
    _, _, report = objective_of(bypassed, logprob_T, algorithm("algorithm.proximal=sampler"))
    own_T = samples["mask"] & torch.repeat_interleave(samples["valid"], samples.lengths)
    ratio_T = (logprob_T - samples["sampler_logprob"]).exp()
    assert report["policy"].summary()["ratio_mean"] == pytest.approx(float(ratio_T[own_T].mean()))
    gap_T = (logprob_T - samples["sampler_logprob"]).abs()
    assert report["gap"].summary()["mean_abs"] == pytest.approx(float(gap_T[own_T].mean()))


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [record["metrics"] for record in read_metrics(run_dir) if record["kind"] == "train"]


BRIEF = ("batch.steps=2", "data.validation=null", "checkpoint.every_steps=0", "algorithm.kl=none")
FAR = ("rollout.sampling.top_p=0.5", "algorithm.max_sampler_gap=null")
"""The sampler leaves tokens out that the trainer gives a probability: a gap."""


def test_runs_weigh_and_reject_and_say_how_much(inputs: Path, tmp_path: Path) -> None:
    given = {
        "weighed": ("algorithm.correction={weights: truncated, threshold: 0.515}",),
        "rejected": ("algorithm.correction={reject: k1, reject_threshold: 0.662}", "batch.prompts_per_update=4"),
        "all": ("algorithm.correction={reject: k1, reject_level: sequence-mean, reject_threshold: 1.0e-9}",),
        "bypassed": ("algorithm.proximal=sampler",),
    }
    shown = {}
    for name, changes in given.items():
        assert run_training(train_settings(inputs, tmp_path / name, *BRIEF, *FAR, *changes), resume=False) == 0
        shown[name] = records(tmp_path / name)
    assert all(
        0 < step["correction_bounded_share"] <= 1 and step["correction_weight"] < 0.516 for step in shown["weighed"]
    )
    assert all(0 < step["rejected_share"] < 1 and step["grad_norm"] > 0 for step in shown["rejected"])
    assert all(step["rejected_share"] == 1 and step["updates"] == 0 for step in shown["all"])
    assert all(step["sampler_gap"] > 0.1 for name in shown for step in shown[name])
    assert shown["bypassed"][0]["ratio_mean"] != pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
def test_over_two_devices_it_is_what_it_is_on_one(inputs: Path, tmp_path: Path) -> None:
    correction = (
        "{weights: banded, low: 0.3, threshold: 0.515, reject: k3, reject_level: sequence-mean, reject_threshold: 0.18}"
    )
    changes = (*BRIEF, *FAR, f"algorithm.correction={correction}")
    for name, more in (("one", ()), ("two", ("cluster.devices_per_node=2",))):
        assert run_training(train_settings(inputs, tmp_path / name, *changes, *more), resume=False) == 0
    one, two = records(tmp_path / "one"), records(tmp_path / "two")
    names = ("loss", "grad_norm", "rejected_share", "correction_weight", "correction_bounded_share", "sampler_gap")
    for alone, together in zip(one, two, strict=True):
        assert {name: together[name] for name in names} == pytest.approx(
            {name: alone[name] for name in names}, rel=1e-4
        )
        assert 0 < alone["rejected_share"] < 1


def test_a_weight_that_adapts_goes_on_where_the_run_was_saved(inputs: Path, tmp_path: Path) -> None:
    changes = ["algorithm.kl=reward", "algorithm.kl_estimator=k1", "algorithm.kl_control=adaptive"]
    changes += ["algorithm.kl_horizon=20", "algorithm.kl_target=0.02", "optimizer.schedule=constant"]
    assert run_training(train_settings(inputs, tmp_path / "whole", *changes, "batch.steps=3"), resume=False) == 0
    for steps, resume in ((2, False), (3, True)):
        settings = train_settings(inputs, tmp_path / "parts", *changes, f"batch.steps={steps}")
        assert run_training(settings, resume=resume) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    shown = records(tmp_path / "parts")
    rule = AdaptiveKl(coefficient=shown[0]["kl_coefficient"], target=0.02, horizon=20)
    assert rule.coefficient == 0.05
    for before, after in zip(shown, shown[1:], strict=False):
        rule = rule.updated(before["kl_reward"], 12)
        assert after["kl_coefficient"] == pytest.approx(rule.coefficient)
    assert shown[-1]["kl_coefficient"] != 0.05
    newest = sorted((tmp_path / "whole" / "checkpoints").glob("step-*"))[-1] / "state.json"
    assert json.loads(newest.read_text())["algorithm"]["kl_coefficient"] != shown[-1]["kl_coefficient"]
