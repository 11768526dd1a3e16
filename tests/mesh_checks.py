"""What ranks of a mesh do in tests, and what one process gives for the same."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from meshloom.config.settings import LoraSettings, ModelSettings, OptimizerSettings
from meshloom.samples import Samples
from meshloom.train.build_on_mesh import build_model
from meshloom.train.load import add_lora, load_model
from meshloom.train.mesh import TrainMesh, make_mesh
from meshloom.train.mesh_model import MeshModel
from meshloom.train.model import LossParts, MicrobatchBound, TrainedModel
from tests.models import tiny_model

Axes = tuple[tuple[str, int], ...]
UPDATES = 3
CPU = torch.device("cpu")
BOUND = MicrobatchBound(48)
OPTIMIZER = OptimizerSettings(lr=1e-2, eps=1e-3, max_grad_norm=50.0, weight_decay=0.1, warmup_updates=2)


@dataclass(frozen=True)
class Outcome:
    """What training gave: of each update loss and gradient norm, log-probs of the local samples after it; and at the end
    all weights (from one rank)."""

    losses: list[float]
    norms: list[float]
    logprobs: list[torch.Tensor]
    weights: dict[str, torch.Tensor]


@cache
def folder_of(root: Path, family: str, **changes: Any) -> str:
    folder = root / family
    tiny_model(family, **{"vocab_size": 96, "num_hidden_layers": 2, **changes}).save_pretrained(folder)
    return str(folder)


def settings_of(folder: str, *, lora: bool = False, recompute: bool = False) -> ModelSettings:
    adapters = LoraSettings(rank=4) if lora else None
    return ModelSettings(path=folder, logits_chunk_bytes=96 * 4 * 7, gradient_checkpointing=recompute, lora=adapters)


def make_batch(seed: int) -> Samples:
    """Samples of very different lengths: some begin with the same prompt, one fills a microbatch, one has no response."""
    generator = torch.Generator().manual_seed(seed)

    def some(count: int) -> list[int]:
        return torch.randint(3, 96, (count,), generator=generator).tolist()

    prompt = some(6)
    pairs = [(prompt, some(5)), (prompt, some(9)), (prompt, some(1)), (some(8), some(40)), (some(4), [])]
    pairs += [(some(3), some(4)), (some(2), some(7)), (some(5), some(2)), (some(1), some(3))]
    lengths = torch.tensor([len(p) + len(r) for p, r in pairs])
    mask = torch.cat([torch.tensor([False] * len(p) + [True] * len(r)) for p, r in pairs])
    samples = Samples(lengths, {"ids": torch.tensor([token for p, r in pairs for token in (*p, *r)]), "mask": mask})
    return samples.with_tokens(weight=torch.randn(samples.num_tokens, generator=generator))


def weighted(microbatch: Samples, logprob_T: torch.Tensor, entropy_T: torch.Tensor) -> LossParts:
    """A loss whose gradient differs at every token."""
    per_token = microbatch["weight"] * logprob_T + 0.1 * entropy_T * microbatch["weight"].abs()
    return LossParts((per_token * microbatch["mask"]).sum() / 64, {"tokens": microbatch["mask"].sum()})


def local_part(samples: Samples, mesh: TrainMesh, *, all_on_first: bool = False) -> Samples:
    """The samples of this rank's data place."""
    places = [0 if all_on_first else i % mesh.num_data_places for i in range(len(samples))]
    return samples.select([i for i, place in enumerate(places) if place == mesh.data_place])


def updates(model: TrainedModel, batches: list[Samples], temperature: float = 0.9) -> Outcome:
    """Three updates of a model on batches of its own."""
    losses, norms, logprobs = [], [], []
    for batch in batches:
        losses.append(float(model.forward_backward(batch, weighted, temperature=temperature)["loss"]))
        norms.append(model.optim_step(UPDATES).grad_norm)
        logprobs.append(torch.stack(model.forward(batch, temperature=temperature)))
    return Outcome(losses, norms, logprobs, {})


@cache
def in_one_process(folder: str, *, lora: bool = False) -> Outcome:
    """The same by a model on one device."""
    settings = settings_of(folder, lora=lora)
    plain = load_model(folder, torch.float32, CPU)
    module = add_lora(plain, settings.lora, 1) if settings.lora is not None else plain
    model = TrainedModel(module, settings, BOUND, OPTIMIZER)
    found = updates(model, [make_batch(step) for step in range(UPDATES)])
    found.weights.update((name, tensor.clone()) for name, tensor in model.weights())
    return found


def mesh_of(meshes: list[tuple[Axes, list[int]]]) -> TrainMesh:
    """The mesh of this process, of several side by side."""
    made = [make_mesh(axes, ranks, CPU) for axes, ranks in meshes]
    return next(mesh for mesh in made if mesh is not None)


def model_on(
    mesh: TrainMesh, folder: str, *, stages_per_device: int = 1, bound: MicrobatchBound = BOUND, **changes: bool
) -> MeshModel:
    settings = settings_of(folder, **changes)
    return build_model(settings, mesh, bound, OPTIMIZER, seed=1, stages_per_device=stages_per_device)


def train_on(
    meshes: list[tuple[Axes, list[int]]],
    folder: str,
    all_on_first: bool = False,
    changes: dict[str, Any] | None = None,
) -> Outcome:
    """Three updates on a mesh, of several side by side; weights from the first rank of each
    stage alone."""
    mesh = mesh_of(meshes)
    model = model_on(mesh, folder, **(changes or {}))
    batches = [local_part(make_batch(step), mesh, all_on_first=all_on_first) for step in range(UPDATES)]
    found = updates(model, batches)
    whole = {name: tensor.full_tensor() for name, tensor in model.weights()}
    first = mesh.rank % (len(mesh) // mesh.size("pp")) == 0
    found.weights.update(whole if first else {})
    return found


def with_all_weights(outcome: Outcome, stages: list[Outcome]) -> Outcome:
    """The same with the weights that all stages have."""
    weights = {name: tensor for stage in stages for name, tensor in stage.weights.items()}
    return Outcome(outcome.losses, outcome.norms, outcome.logprobs, weights)


def assert_same(
    found: list[Outcome],
    expected: Outcome,
    *,
    places: int,
    all_on_first: bool = False,
    weights: bool = True,
) -> None:
    """Loss, gradient norm, log-probs of each update, and weights after the last, to 1e-5. ``found``: one of each data
    place, in order."""
    assert len(found) == places
    for update, norm in enumerate(expected.norms):
        assert sum(outcome.losses[update] for outcome in found) == pytest.approx(expected.losses[update], abs=1e-5)
        for outcome in found:
            assert outcome.norms[update] == pytest.approx(norm, rel=1e-5)
        batch = make_batch(update)
        whole = expected.logprobs[update].split(batch.lengths.tolist(), dim=1)
        for place, outcome in enumerate(found):
            own = [x for i, x in enumerate(whole) if (0 if all_on_first else i % places) == place]
            mine = torch.cat(own, 1) if own else torch.zeros(len(expected.logprobs[update]), 0)
            torch.testing.assert_close(outcome.logprobs[update], mine, rtol=1e-5, atol=1e-5)
    if not weights:
        return
    assert found[0].weights.keys() == expected.weights.keys()
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(found[0].weights[name], tensor, rtol=0, atol=1e-5)
