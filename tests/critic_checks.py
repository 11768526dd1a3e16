"""What ranks of a mesh do with a critic in tests, and what one process gives for the same."""

from functools import cache

import torch

from meshloom.algorithms.reduce import Denominators, denominators
from meshloom.loop.value_objective import ValueObjective
from meshloom.samples import Samples
from meshloom.train.build_on_mesh import build_model
from meshloom.train.model import TrainedModel
from meshloom.train.value_head import load_value_model
from tests.mesh_checks import (
    BOUND,
    CPU,
    OPTIMIZER,
    UPDATES,
    Axes,
    Outcome,
    local_part,
    make_batch,
    mesh_of,
    settings_of,
)


def returned(seed: int) -> Samples:
    """Samples with values and returns of their own at every token."""
    samples, generator = make_batch(seed), torch.Generator().manual_seed(seed + 100)
    old, returns = (torch.randn(samples.num_tokens, generator=generator) for _ in range(2))
    return samples.with_tokens(values=0.3 * old, returns=returns)


def objective(samples: Samples, reduction: str = "seq-mean-token-mean") -> ValueObjective:
    """The value loss of all samples of an update; a clip that binds at some tokens."""
    totals: Denominators = denominators(samples["mask"], samples.lengths)
    return ValueObjective(0.2, reduction, totals)


def updates(model: TrainedModel, batches: list[Samples], losses_of: list[ValueObjective]) -> Outcome:
    """Three updates of a critic on samples of its own; in place of log-probs, its values after each."""
    losses, norms, values = [], [], []
    for batch, loss in zip(batches, losses_of, strict=True):
        losses.append(float(model.forward_backward(batch, loss)["loss"]))
        norms.append(model.optim_step(UPDATES).grad_norm)
        values.append(torch.stack(model.forward(batch)))
    return Outcome(losses, norms, values, {})


@cache
def in_one_process(folder: str) -> Outcome:
    """By a critic on one device."""
    module = load_value_model(folder, torch.float32, CPU)
    model = TrainedModel(module, settings_of(folder), BOUND, OPTIMIZER)
    batches = [returned(step) for step in range(UPDATES)]
    found = updates(model, batches, [objective(batch) for batch in batches])
    found.weights.update((name, tensor.clone()) for name, tensor in model.weights())
    return found


def train_on(meshes: list[tuple[Axes, list[int]]], folder: str, **cut: int) -> Outcome:
    """On a mesh, of several side by side; weights from the first rank of each stage alone."""
    mesh = mesh_of(meshes)
    model = build_model(settings_of(folder), mesh, BOUND, OPTIMIZER, scalar_head=True, **cut)
    whole = [returned(step) for step in range(UPDATES)]
    found = updates(model, [local_part(batch, mesh) for batch in whole], [objective(batch) for batch in whole])
    weights = {name: tensor.full_tensor() for name, tensor in model.weights()}
    first = mesh.rank % (len(mesh) // mesh.size("pp")) == 0
    found.weights.update(weights if first else {})
    return found
