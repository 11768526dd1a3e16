"""The critic: a value model, what it learns, and PPO with it on one device."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification

from meshloom.algorithms.reduce import denominators
from meshloom.config.errors import RunFault, UserError
from meshloom.config.load import load_settings
from meshloom.config.settings import OptimizerSettings, TrainSettings
from meshloom.loop.train import run_training
from meshloom.loop.value_objective import ValueObjective, check_read, value_metrics
from meshloom.observe.records import read_metrics
from meshloom.plan.build import build_plan
from meshloom.samples import Samples
from meshloom.train.export import export_model
from meshloom.train.model import MicrobatchBound, TrainedModel
from meshloom.train.value_head import load_value_model
from tests.critic_checks import in_one_process, objective, returned, updates
from tests.lesson_runs import assert_same_run, comparable_metrics, train_settings, write_inputs
from tests.mesh_checks import CPU, OPTIMIZER, UPDATES, folder_of, make_batch, settings_of
from tests.models import FAMILIES, tiny_model

PPO = (
    "algorithm.advantage=gae",
    "algorithm.lam=0.95",
    "critic.warmup_steps=2",
    "critic.optimizer.lr=1e-2",
    "critic.tokens_per_microbatch=100",
    "batch.steps=4",
    "validation.every_steps=0",
    "checkpoint.keep_last=9",
)


def critic_of(folder: str | Path, tokens: int = 48, *, head: float | None = None) -> TrainedModel:
    """A critic; ``head``: the spread of its head's weights, if it is not the folder's."""
    module = load_value_model(folder, torch.float32, CPU)
    if head is not None:
        torch.nn.init.normal_(module.score.weight, std=head, generator=torch.Generator().manual_seed(5))
        torch.nn.init.constant_(module.score.bias, 0.25)
    return TrainedModel(module, settings_of(str(folder)), MicrobatchBound(tokens), OPTIMIZER)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_is_read_where_its_token_is_predicted(folders: Path, family: str) -> None:
    """The value of token t is the head on the hidden state of token t − 1: t itself does not change it, t − 1 does."""
    folder = folder_of(folders / "three", family, num_hidden_layers=3)
    critic, samples = critic_of(folder, head=1.0), make_batch(0)
    (value_T,) = critic.forward(samples)
    ids, mask = samples.select([3])["ids"], samples.select([3])["mask"]
    (own_T,) = critic.forward(samples.select([3]))
    hidden = tiny_model(family, vocab_size=96).get_decoder()(ids[None]).last_hidden_state[0]
    head = critic.module.score
    expected = torch.nn.functional.linear(hidden, head.weight, head.bias)[:, 0]
    torch.testing.assert_close(own_T[1:], torch.where(mask, expected.roll(1), 0.0)[1:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(value_T[samples.offsets[3] : samples.offsets[4]], own_T)
    assert bool((value_T[~samples["mask"]] == 0).all())
    at = 20
    changed = ids.clone()
    changed[at] = (changed[at] + 1) % 90 + 3
    (other_T,) = critic.forward(Samples(torch.tensor([len(ids)]), {"ids": changed, "mask": mask}))
    assert torch.equal(other_T[: at + 1], own_T[: at + 1])
    assert not torch.isclose(other_T[at + 1 : at + 5], own_T[at + 1 : at + 5]).any()


def test_a_fresh_head_is_zero_and_every_parameter_learns(folders: Path) -> None:
    critic = critic_of(folder_of(folders, "qwen3"))
    assert float(critic.forward(make_batch(0))[0].abs().max()) == 0
    before = {name: tensor.clone() for name, tensor in critic.weights()}
    batches = [returned(step) for step in range(UPDATES)]
    updates(critic, batches, [objective(batch) for batch in batches])
    assert {name for name, tensor in critic.weights() if torch.equal(tensor, before[name])} == set()
    assert "lm_head.weight" not in before


def test_returns_that_follow_from_what_was_read_are_learned(folders: Path) -> None:
    """Of other samples too: nothing is learned of one value that stands a token further on or back."""
    settings = OptimizerSettings(lr=3e-3, warmup_updates=2)
    module = load_value_model(folder_of(folders, "qwen3"), torch.float32, CPU)
    critic = TrainedModel(module, settings_of(folder_of(folders, "qwen3")), MicrobatchBound(4096), settings)

    def judged(seed: int) -> Samples:
        """Each token's return is the parity of the token before it."""
        samples = make_batch(seed)
        returns = (samples["ids"].roll(1) % 2).double()
        return samples.with_tokens(values=critic.forward(samples)[0], returns=returns)

    def explained() -> float:
        return value_metrics(judged(1000).with_rows(valid=torch.ones(len(judged(1000)), dtype=torch.bool)))[
            "explained_variance"
        ]

    assert abs(explained()) < 1e-6
    for seed in range(60):
        batch = judged(seed)
        critic.forward_backward(batch, ValueObjective(0.5, "token-mean", denominators(batch["mask"], batch.lengths)))
        critic.optim_step(60)
    assert explained() > 0.9


def test_the_gradient_does_not_depend_on_microbatches(folders: Path) -> None:
    folder = folder_of(folders, "llama")
    batches = [returned(step) for step in range(UPDATES)]
    whole = updates(critic_of(folder, 10_000), batches, [objective(batch) for batch in batches])
    expected = in_one_process(folder)
    assert whole.losses == pytest.approx(expected.losses, rel=1e-5)
    assert whole.norms == pytest.approx(expected.norms, rel=1e-5)
    for one, other in zip(whole.logprobs, expected.logprobs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_folders_with_a_head_of_one_output_keep_it(folders: Path, tmp_path: Path) -> None:
    """Those of token and of sequence classification, whose head has no bias; more outputs than one are refused."""
    critic = critic_of(folder_of(folders, "qwen2", attention_bias=False), head=1.0)
    plain = AutoModelForTokenClassification.from_pretrained(folder_of(folders, "qwen2"), num_labels=1)
    plain.save_pretrained(tmp_path / "tokens")
    (value_T,) = critic_of(tmp_path / "tokens").forward(make_batch(1))
    ids, lengths = make_batch(1)["ids"], make_batch(1).lengths
    theirs = [plain.eval()(one[None]).logits[0, :, 0].detach().roll(1) for one in ids.split(lengths.tolist())]
    expected = torch.where(make_batch(1)["mask"], torch.cat(theirs), 0.0)
    torch.testing.assert_close(value_T, expected, rtol=1e-4, atol=1e-5)
    assert float(value_T.abs().max()) > 0
    state = dict(plain.state_dict())
    assert state.keys() == dict(critic.weights()).keys()
    two = AutoModelForTokenClassification.from_pretrained(folder_of(folders, "qwen2"), num_labels=2)
    two.save_pretrained(tmp_path / "two")
    with pytest.raises(UserError, match="2 outputs") as caught:
        load_value_model(tmp_path / "two", torch.float32, CPU)
    assert caught.value.where == "critic.model"


def test_explained_variance_is_of_valid_tokens_of_the_model() -> None:
    returns, values = [1.0, 2.0, 4.0, 9.0, 5.0], [1.0, 1.0, 3.0, 9.0, 5.0]
    batch = Samples(
        torch.tensor([3, 2]),
        {
            "mask": torch.tensor([False, True, True, True, True]),
            "returns": torch.tensor(returns),
            "values": torch.tensor(values),
        },
        {"valid": torch.tensor([True, False])},
    )
    assert value_metrics(batch) == pytest.approx({"value_mean": 2.0, "return_mean": 3.0, "explained_variance": 1.0})
    both = value_metrics(batch.with_rows(valid=torch.tensor([True, True])))
    left, spread = torch.tensor([1.0, 1.0, 0.0, 0.0]).var(), torch.tensor(returns[1:]).var()
    assert both["explained_variance"] == pytest.approx(float(1 - left / spread))
    same = value_metrics(batch.with_tokens(returns=torch.full((5,), 7.0)))
    assert same.keys() == {"value_mean", "return_mean"}
    assert value_metrics(Samples(torch.tensor([1]), {"mask": torch.tensor([True])})) == {}


def test_a_token_that_the_critic_does_not_have_stops_the_run_by_name() -> None:
    batch = make_batch(0)
    highest = int(batch["ids"].max())
    check_read(batch, highest + 1)
    check_read(batch, None)
    with pytest.raises(RunFault, match=f"token {highest}, the critic has {highest} tokens"):
        check_read(batch, highest)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def whole(inputs: Path) -> Path:
    """A finished run of four steps, two of which the critic learns alone."""
    assert run_training(train_settings(inputs, inputs / "whole", *PPO), resume=False) == 0
    return inputs / "whole"


def test_the_actor_waits_while_the_critic_warms_up(inputs: Path, whole: Path) -> None:
    """No version passes, samples are of the first weights, and schedules count the updates that are made."""
    records = [record for record in read_metrics(whole) if record["kind"] == "train"]
    assert [record["metrics"]["weights_version"] for record in records] == [0, 0, 2, 4]
    assert [("grad_norm" in record["metrics"]) for record in records] == [False, False, True, True]
    assert records[-1]["metrics"]["learning_rate"] == pytest.approx(5e-3 / 4)
    for record in records:
        metrics = record["metrics"]
        assert {"values", "critic"} <= set(record["phases"])
        assert metrics["critic_learning_rate"] == 1e-2
        assert metrics["critic_grad_norm"] > 0
        assert 0 <= metrics["value_clip_share"] <= 1
    assert records[0]["metrics"]["value_mean"] == 0
    assert records[0]["metrics"]["explained_variance"] == pytest.approx(0)
    first = load_file(inputs / "model" / "model.safetensors")
    at = [load_file(whole / "checkpoints" / f"step-{step:06d}" / "model" / "model.safetensors") for step in (2, 3)]
    assert all(torch.equal(first[name], at[0][name]) for name in at[0])
    assert not all(torch.equal(first[name], at[1][name]) for name in at[1])


def test_in_the_warm_up_the_weight_of_the_divergence_rests_and_a_reference_that_is_refreshed_is_saved(
    inputs: Path, tmp_path: Path
) -> None:
    """The weight followed the divergence of an actor that did not learn, which is 0; a reference refreshed with version 0 was
    taken for one that never was, and was in no checkpoint."""
    changes = ("algorithm.kl=reward", "algorithm.kl_control=adaptive", "algorithm.kl_horizon=20", "batch.steps=3")
    changes += ("reference.refresh_every_steps=1", "data.validation=null")
    assert run_training(train_settings(inputs, tmp_path / "run", *PPO, *changes), resume=False) == 0
    metrics = [record["metrics"] for record in read_metrics(tmp_path / "run")]
    assert [step["kl_coefficient"] for step in metrics] == [0.05, 0.05, 0.05]
    assert [step["reference_version"] for step in metrics] == [0, 0, 0]
    saved = [tmp_path / "run" / "checkpoints" / f"step-00000{step}" for step in (1, 2, 3)]
    kept = [json.loads((folder / "state.json").read_text())["algorithm"] for folder in saved]
    assert [each["kl_coefficient"] for each in kept[:2]] == [0.05, 0.05] and kept[2]["kl_coefficient"] != 0.05
    assert [each["reference_version"] for each in kept] == [None, 0, 0]
    assert [(folder / "reference").is_dir() for folder in saved] == [False, True, True]


def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_happened(inputs: Path, whole: Path) -> None:
    """From the middle of the warm-up, and after it."""
    for step in (1, 3):
        other = inputs / f"from-{step}"
        shutil.copytree(whole, other, ignore=shutil.ignore_patterns("*.lock"))
        for folder in sorted((other / "checkpoints").glob("step-*"))[step:]:
            shutil.rmtree(folder)
        assert run_training(train_settings(inputs, other, *PPO), resume=True) == 0
        assert_same_run(whole, other)


def test_an_export_is_the_actor_and_a_checkpoint_has_the_critic_as_a_folder(
    inputs: Path, whole: Path, tmp_path: Path
) -> None:
    newest = sorted((whole / "checkpoints").glob("step-*"))[-1]
    exported = export_model(whole, tmp_path / "out")
    assert (exported / "model.safetensors").read_bytes() == (newest / "model" / "model.safetensors").read_bytes()
    assert not (exported / "critic").exists()
    config = json.loads((newest / "critic" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForTokenClassification"]
    _, info = AutoModelForTokenClassification.from_pretrained(newest / "critic", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    given = (f"critic.model={newest / 'critic'}", "batch.steps=1", "critic.warmup_steps=0")
    assert run_training(train_settings(inputs, tmp_path / "next", *PPO, *given), resume=False) == 0
    first = next(record for record in read_metrics(tmp_path / "next") if record["kind"] == "train")
    assert first["metrics"]["value_mean"] != 0


def test_adapters_of_the_actor_leave_the_critic_whole(inputs: Path, tmp_path: Path) -> None:
    more = ("model.lora={rank: 2}", "batch.steps=1", "critic.warmup_steps=0", "algorithm.kl=reward")
    assert run_training(train_settings(inputs, tmp_path / "run", *PPO, *more), resume=False) == 0
    newest = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1]
    assert {path.name for path in newest.iterdir() if path.is_dir()} == {"adapter", "critic"}
    names = set(load_file(newest / "critic" / "model.safetensors"))
    assert {"score.weight", "score.bias", "model.embed_tokens.weight"} <= names
    assert not any("lora" in name for name in names)


def test_what_leaves_the_device_between_phases_changes_nothing(inputs: Path, whole: Path, tmp_path: Path) -> None:
    away = ("offload.critic.parameters=host", "offload.critic.optimizer=disk", "offload.actor.optimizer=host")
    assert run_training(train_settings(inputs, tmp_path / "run", *PPO, *away), resume=False) == 0
    assert comparable_metrics(tmp_path / "run") == comparable_metrics(whole)
    lines = [json.loads(line) for line in (tmp_path / "run" / "memory.jsonl").read_text().splitlines()]
    at = {line["phase"]: line["at"] for line in lines}
    assert at["values"]["critic.parameters"] == at["update"]["critic.optimizer"] == "device"
    assert (at["generate"]["critic.parameters"], at["values"]["critic.optimizer"]) == ("host", "disk")


def test_the_ledger_is_what_a_critic_holds(inputs: Path) -> None:
    """Weights, moments and gradients of the plan against those of the model, to 2 %."""
    plan = build_plan(train_settings(inputs, inputs / "planned", *PPO), 14)
    critic = critic_of(inputs / "model")
    batch = returned(0).with_tokens(ids=returned(0)["ids"] % 40)
    critic.forward_backward(batch, objective(batch))
    gradients = sum(parameter.grad.nbytes for parameter in critic.module.parameters())
    critic.optim_step(1)
    weights = sum(parameter.nbytes for parameter in critic.module.parameters())
    moments = sum(value.nbytes for value in critic.optimizer.state_tensors().values())
    held = {"weights": weights, "gradients": gradients, "optimizer moments": moments}
    assert {name: plan.value(f"critic's {name}") for name in held} == pytest.approx(held, rel=0.02)
    assert plan.value("critic's parameters") == sum(parameter.numel() for parameter in critic.module.parameters())
    assert plan.value("critic's updates of the run") == 8
    assert plan.value("updates of the run") == 4


def planned(inputs: Path, *changes: str) -> tuple[list[str], list[str]]:
    """Codes of refusals and of warnings."""
    settings: TrainSettings = train_settings(inputs, inputs / "planned", "algorithm.kl_coefficient=0.1", *changes)
    plan = build_plan(settings, 14)
    return [problem.code for problem in plan.problems], [warning.code for warning in plan.warnings]


def test_what_a_critic_cannot_be_is_refused_and_what_it_is_not_for_is_told(inputs: Path, folders: Path) -> None:
    gae = "algorithm.advantage=gae"
    assert planned(inputs, gae) == ([], [])
    assert planned(inputs, "critic.optimizer.lr=1e-3", "critic.warmup_steps=2") == ([], ["Q001", "Q001"])
    assert planned(inputs, gae, "critic.tokens_per_microbatch=71") == (["Q002"], [])
    assert planned(inputs, gae, "critic.tokens_per_microbatch=72") == ([], [])
    assert planned(inputs, gae, "critic.warmup_steps=6") == ([], ["Q003"])
    assert planned(inputs, gae, "critic.optimizer.lr=0") == ([], ["Q004"])
    assert planned(inputs, gae, f"critic.model={inputs / 'nothing'}") == (["Q006"], [])
    small = inputs / "small"
    tiny_model("llama", vocab_size=20).save_pretrained(small)
    assert planned(inputs, gae, f"critic.model={small}") == (["Q007"], [])
    assert planned(inputs, gae, f"critic.model={folder_of(folders, 'llama')}") == ([], [])
    assert (
        load_settings(TrainSettings, None, ["run_dir=a", "model.path=m", "data.train.files=[x]"]).critic.model is None
    )
