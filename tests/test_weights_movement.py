"""Weights arrive: direct copies into another layout, loaders where there is none, and every fault by the tensor's name."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from meshloom.config.errors import RunFault
from meshloom.config.settings import LoraSettings, ModelSettings, OptimizerSettings
from meshloom.samples import Samples
from meshloom.train.attention import use_layouts
from meshloom.train.load import add_lora
from meshloom.train.model import LossParts, MicrobatchBound, TrainedModel
from meshloom.weights import movement as movement_module
from meshloom.weights.feed import TrainerFeed
from meshloom.weights.movement import Movement
from meshloom.weights.probe import probe, probe_ids, trainer_logprobs
from meshloom.weights.source import WeightsSource
from tests.models import FAMILIES, tiny_model

PARTS = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up", "up_proj": "gate_up"}
PADDING = 31


class FusedModel(nn.Module):
    """A model as engines keep it: projections that are computed together in one matrix, a padded vocabulary, no tied copies."""

    def __init__(self, tensors: dict[str, Tensor], *, adds_one: bool = False, forgets: str = "") -> None:
        super().__init__()
        self.adds_one, self.forgets = adds_one, forgets
        self.rows: dict[str, tuple[str, int]] = {}
        shapes: dict[str, list[int]] = {}
        for name, tensor in tensors.items():
            target, shape = self.target(name), list(tensor.shape)
            if target in shapes:
                self.rows[name] = (target, shapes[target][0])
                shapes[target][0] += shape[0]
            else:
                self.rows[name], shapes[target] = (target, 0), shape
        for target, shape in shapes.items():
            if "embed" in target:
                shape[0] += PADDING
            weight = nn.Parameter(torch.randn(shape), requires_grad=False)
            self.register_parameter(target.replace(".", "/"), weight)

    @staticmethod
    def target(name: str) -> str:
        for part, whole in PARTS.items():
            name = name.replace(f".{part}.", f".{whole}.")
        return name

    def parameter(self, name: str) -> Tensor:
        return self.get_parameter(name.replace(".", "/"))

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if name == self.forgets:
                continue
            target, row = self.rows[name]
            whole = self.parameter(target).data
            whole.narrow(0, row, len(tensor)).copy_(tensor + 1 if self.adds_one and "norm" in name else tensor)
            if "embed" in name:
                whole[len(tensor) :].fill_(0)

    def holds(self, tensors: dict[str, Tensor]) -> bool:
        """Whether the parameters are these tensors, padding 0."""
        same = True
        for name, tensor in tensors.items():
            target, row = self.rows[name]
            same &= torch.equal(self.parameter(target)[row : row + len(tensor)], tensor)
            if "embed" in name:
                same &= not self.parameter(target)[len(tensor) :].any()
        return same


class FusedReceiver:
    """Counts how it is filled."""

    def __init__(self, model: FusedModel, *, keeps_layout: bool = True) -> None:
        self.fused, self.keeps_layout, self.reloads = model, keeps_layout, 0

    def model(self) -> FusedModel:
        return self.fused

    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self.fused.load_weights(tensors)

    def reload(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self.reloads += 1
        tied = {"lm_head.weight"} - self.fused.rows.keys()
        self.fused.load_weights((name, tensor) for name, tensor in tensors if name not in tied)


def trained(family: str, *, lora: bool = False, optimizer: bool = False) -> TrainedModel:
    module = tiny_model(family)
    use_layouts(module)
    settings = ModelSettings(path="-", lora=LoraSettings(rank=4) if lora else None)
    if lora:
        module = add_lora(module, settings.lora, seed=1)
    return TrainedModel(module, settings, MicrobatchBound(100), OptimizerSettings(lr=0.01) if optimizer else None)


def changed(model: TrainedModel, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.add_(torch.randn_like(parameter))


@pytest.mark.parametrize("bucket_bytes", [1, 30_000, 1 << 30])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_movement_finds_the_places_and_later_ones_only_copy(monkeypatch, family, bucket_bytes):
    monkeypatch.setattr(movement_module, "_BUCKET_BYTES", bucket_bytes)
    model = trained(family)
    source = WeightsSource(model)
    receiver = FusedReceiver(FusedModel(dict(source())))
    movement = Movement(source)
    first = movement.move(receiver)
    assert first.direct and receiver.fused.holds(dict(source()))
    assert first.num_bytes == sum(t.nbytes for t in {t.data_ptr(): t for _, t in model.weights()}.values())
    monkeypatch.setattr(FusedModel, "load_weights", None)
    changed(model, 3)
    with torch.no_grad():  # as after a sleep, whose memory comes back with anything in it
        for parameter in receiver.fused.parameters():
            parameter.fill_(torch.nan)
    second = movement.move(receiver)
    assert receiver.fused.holds(dict(source())) and receiver.reloads == 0
    assert second.checksum != first.checksum and movement.move(receiver).checksum == second.checksum


def test_a_head_that_is_the_embedding_comes_once_and_packed_engines_get_it_twice():
    source = WeightsSource(trained("qwen2"))
    assert source.tied == {"lm_head.weight": "model.embed_tokens.weight"} and "lm_head.weight" not in dict(source())
    assert WeightsSource(trained("llama")).tied == {}
    names = []
    receiver = FusedReceiver(FusedModel(dict(source())), keeps_layout=False)
    load = receiver.fused.load_weights
    receiver.reload = lambda tensors: load(
        pair for pair in tensors if names.append(pair[0]) or "lm_head" not in pair[0]
    )
    assert not Movement(source).move(receiver).direct
    assert names.count("lm_head.weight") == 1 and receiver.fused.holds(dict(source()))


def test_loaders_that_compute_are_used_each_time():
    """A table of copies would lose what they compute."""
    model = trained("llama")
    source = WeightsSource(model)
    receiver = FusedReceiver(FusedModel(dict(source()), adds_one=True))
    movement = Movement(source)
    with pytest.raises(RunFault, match=r"norm\.weight") as fault:
        movement.move(receiver)
    assert receiver.reloads == 1 and movement.direct is None and all("norm" in name for name in movement.not_direct)
    assert "did not take it whole" in fault.value.why


def test_a_loader_that_changes_what_it_copied_is_not_replaced_by_copies():
    model = trained("llama")
    source = WeightsSource(model)

    class Doubles(FusedModel):
        def load_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
            super().load_weights(tensors)
            self.parameter("model.norm.weight").mul_(2)

    receiver = FusedReceiver(Doubles(dict(source())))
    movement = Movement(source)
    assert not movement.move(receiver).direct and movement.not_direct == ["model/norm/weight"]
    assert torch.equal(receiver.fused.parameter("model.norm.weight"), 2 * dict(source())["model.norm.weight"])


def test_a_parameter_that_no_tensor_fills_is_not_left_to_copies():
    model = trained("llama")
    source = WeightsSource(model)
    receiver = FusedReceiver(FusedModel(dict(source())))
    receiver.fused.register_parameter("scale", nn.Parameter(torch.ones(3), requires_grad=False))
    movement = Movement(source)
    assert not movement.move(receiver).direct and movement.not_direct == ["scale"] and receiver.reloads == 1


def test_a_tensor_the_engine_forgets_stops_the_run_by_name():
    source = WeightsSource(trained("llama"))
    receiver = FusedReceiver(FusedModel(dict(source()), forgets="model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(RunFault, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        Movement(source).move(receiver)


def test_a_copy_that_goes_wrong_stops_the_run_by_name(monkeypatch):
    model = trained("llama")
    source = WeightsSource(model)
    receiver, movement = FusedReceiver(FusedModel(dict(source()))), Movement(source)
    movement.move(receiver)
    copy = torch._foreach_copy_

    def damaged(targets: list[Tensor], parts: list[Tensor], **options: bool) -> None:
        copy(targets, parts, **options)
        receiver.fused.parameter("model.layers.2.self_attn.qkv_proj.weight")[70, 5] += 1

    monkeypatch.setattr(torch, "_foreach_copy_", damaged)
    with pytest.raises(RunFault, match=r"model\.layers\.2\.self_attn\.k_proj\.weight\n"):
        movement.move(receiver)


def test_wider_weights_are_rounded_on_the_way():
    model = trained("llama")
    source = WeightsSource(model)
    receiver, movement = FusedReceiver(FusedModel(dict(source())).bfloat16()), Movement(source)
    for seed in (1, 2):
        changed(model, seed)
        assert movement.move(receiver).direct
        assert receiver.fused.holds({name: tensor.bfloat16() for name, tensor in source()})


@pytest.mark.parametrize("kind", ["shape", "dtype", "missing", "unknown"])
def test_tensors_other_than_agreed_stop_the_run_by_name(kind):
    tensors = dict(WeightsSource(trained("llama"))())

    class Given:
        tied: dict[str, str] = {}

        def __call__(self) -> Iterator[tuple[str, Tensor]]:
            yield from tensors.items()

    receiver, movement = FusedReceiver(FusedModel(tensors)), Movement(Given())
    movement.move(receiver)
    name = "model.layers.0.mlp.down_proj.weight"
    if kind == "missing":
        del tensors[name]
    elif kind == "unknown":
        name, tensors["model.extra.weight"] = "model.extra.weight", torch.zeros(2)
    else:
        tensors[name] = tensors[name][:5] if kind == "shape" else tensors[name].double()
    with pytest.raises(RunFault, match=name.replace(".", r"\.")):
        movement.move(receiver)


def test_adapters_are_merged_on_the_way_and_the_trainers_weights_stay():
    model = trained("qwen2", lora=True)
    changed(model, 5)
    before = {name: tensor.clone() for name, tensor in model.weights()}
    source = WeightsSource(model)
    moved = dict(source())
    assert moved.keys() == dict(WeightsSource(trained("qwen2"))()).keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.weights())
    merged = model.module.merge_and_unload()
    for name, tensor in merged.state_dict().items():
        if name in moved:
            torch.testing.assert_close(moved[name], tensor, atol=1e-5, rtol=1e-5)


def test_adapters_that_learn_reach_the_engine_by_copies():
    model = trained("llama", lora=True, optimizer=True)
    source = WeightsSource(model)
    receiver, movement = FusedReceiver(FusedModel(dict(source()))), Movement(source)
    first = movement.move(receiver)
    samples = Samples(torch.tensor([6]), {"ids": torch.arange(6), "mask": torch.tensor([False] + [True] * 5)})
    model.forward_backward(samples, lambda _s, logprob, _e: LossParts(-logprob.sum(), {}), temperature=1.0)
    model.optim_step(10)
    second = movement.move(receiver)
    assert first.direct and second.direct and first.checksum != second.checksum
    assert receiver.fused.holds(dict(source()))


def test_the_probe_passes_equal_weights_and_stops_other_ones():
    model, other = trained("qwen3"), trained("qwen3")
    ids = probe_ids(97)
    assert probe(trainer_logprobs(other), trainer_logprobs(model), ids, tolerance=1e-6) < 1e-6
    feed = TrainerFeed(model)
    feed.prove(trainer_logprobs(other))
    assert feed.gap < 1e-6
    changed(other, 1)
    with pytest.raises(RunFault, match="disagree"):
        feed.prove(trainer_logprobs(other))
    broken = [[float("nan")] * 15] * 4
    with pytest.raises(RunFault, match="disagree"):
        feed.prove(lambda _: broken)


def test_the_trainers_log_probs_are_the_models_own():
    model, ids = trained("llama"), probe_ids(97)
    plain = tiny_model("llama")
    with torch.no_grad():
        logprob = plain(torch.tensor(ids)).logits[:, :-1].log_softmax(2)
    expected = logprob.gather(2, torch.tensor(ids)[:, 1:, None])[..., 0]
    torch.testing.assert_close(torch.tensor(trainer_logprobs(model)(ids)), expected, atol=1e-4, rtol=0)
