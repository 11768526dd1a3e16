"""Every policy loss, with divergence, entropy, weights and rejection, and the supervised one, on samples and sequences that are
split over ranks."""

from pathlib import Path

import pytest
import torch

from meshloom.algorithms.reduce import denominators
from meshloom.config.load import load_settings
from meshloom.config.names import FIXED_REDUCTIONS, PolicyLoss
from meshloom.config.settings import AlgorithmSettings, OptimizerSettings, TrainSettings
from meshloom.loop.correction import learned, with_kept
from meshloom.loop.objective import PolicyObjective
from meshloom.loop.sft import NegativeLogLikelihood
from meshloom.samples import Samples
from meshloom.train.load import load_model
from meshloom.train.mesh import TrainMesh
from meshloom.train.model import MicrobatchBound, TrainedModel
from tests.mesh_checks import BOUND, CPU, OPTIMIZER, folder_of, local_part, make_batch, mesh_of, model_on, settings_of
from tests.ranks import Ranks

REDUCTIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
GIVEN = (
    "run_dir=r",
    "model.path=m",
    "data.train.files=[a.jsonl]",
    "algorithm.kl=loss",
    "algorithm.kl_coefficient=0.1",
    "algorithm.entropy_coefficient=0.01",
    "algorithm.reduction_constant=40.0",
    "algorithm.correction={weights: truncated, level: sequence}",
    "algorithm.correction.reject=k2",
    "algorithm.correction.reject_level=sequence-mean",
    "algorithm.correction.reject_threshold=0.03",
)


def choices() -> list[AlgorithmSettings]:
    """One algorithm for each loss."""
    return [
        load_settings(
            TrainSettings,
            None,
            [
                *GIVEN,
                f"algorithm.policy_loss={loss}",
                f"algorithm.reduction={FIXED_REDUCTIONS.get(loss, REDUCTIONS[place % len(REDUCTIONS)])}",
            ],
        ).algorithm
        for place, loss in enumerate(PolicyLoss)
    ]


def batch_of(settings: AlgorithmSettings) -> Samples:
    """Samples with all that a loss reads; sampler and trainer disagree, the last two samples have no valid reward."""
    made = make_batch(5)
    generator = torch.Generator().manual_seed(6)
    total = made.num_tokens

    def near(base_T: torch.Tensor, by: float) -> torch.Tensor:
        return base_T + by * torch.randn(total, generator=generator)

    old_T = -4.5 + 0.5 * torch.randn(total, generator=generator)
    made = made.with_tokens(
        old_logprob=old_T,
        sampler_logprob=near(old_T, 0.25),
        reference_logprob=near(old_T, 0.5),
        advantages=torch.randn(total, generator=generator),
        version=torch.zeros(total, dtype=torch.int32),
    )
    made = made.with_rows(valid=torch.tensor([True] * (len(made) - 2) + [False] * 2))
    return learned(with_kept(made, settings.correction))


def learn(model: TrainedModel, mesh: TrainMesh | None = None) -> list[tuple[float, float]]:
    """Loss and gradient norm of an update by each loss, one after the other; on a mesh, of this rank's samples."""
    found = []
    for settings in choices():
        batch = batch_of(settings)
        objective = PolicyObjective.of(batch, settings, 0)
        mine = batch if mesh is None else local_part(batch, mesh)
        report = model.forward_backward(mine, objective, temperature=0.9)
        found.append((float(report["loss"]), model.optim_step(20).grad_norm))
    return found


def learn_on(folder: str) -> list[tuple[float, float]]:
    """The same on a rank of two replicas that split each sequence in two."""
    mesh = mesh_of([((("fsdp", 2), ("sp", 2)), [0, 1, 2, 3])])
    return learn(model_on(mesh, folder), mesh)


def test_every_loss_is_the_same_however_samples_and_sequences_are_split(four_ranks: Ranks, folders: Path) -> None:
    folder = folder_of(folders, "qwen3")
    model = TrainedModel(load_model(folder, torch.float32, CPU), settings_of(folder), BOUND, OPTIMIZER)
    expected = learn(model)
    found = four_ranks.run(learn_on, folder)
    kept = batch_of(choices()[0])
    assert 0 < int(kept["mask"].sum()) < int(kept["sampled"].sum())
    for place, (loss, norm) in enumerate(expected):
        assert norm > 0
        losses = [found[rank][place][0] for rank in (0, 2)]
        assert sum(losses) == pytest.approx(loss, rel=1e-4, abs=1e-5)
        assert [ranks[place][1] for ranks in found] == pytest.approx([norm] * 4, rel=1e-3)


CUTS = ((("fsdp", 2), ("sp", 2)), (("fsdp", 2), ("tp", 2)))


def learn_supervised(model: TrainedModel, mesh: TrainMesh | None = None) -> tuple[float, float]:
    """Loss and gradient norm of a supervised update."""
    batch = make_batch(7)
    loss = NegativeLogLikelihood(denominators(batch["mask"], batch.lengths))
    report = model.forward_backward(batch if mesh is None else local_part(batch, mesh), loss)
    return float(report["loss"]), model.optim_step(20).grad_norm


def learn_supervised_on(folder: str) -> list[tuple[float, float]]:
    """The same on a rank of each cut."""
    meshes = [mesh_of([(axes, [0, 1, 2, 3])]) for axes in CUTS]
    return [learn_supervised(model_on(mesh, folder), mesh) for mesh in meshes]


def test_the_supervised_loss_is_the_same_however_it_is_packed_and_split(four_ranks: Ranks, folders: Path) -> None:
    """It is the mean over all response tokens of an update, whatever its microbatches, replicas and cuts are."""
    folder = folder_of(folders, "qwen3")
    bounds = (BOUND, MicrobatchBound(10_000), MicrobatchBound(10_000, samples=1))

    def built(bound: MicrobatchBound, optimizer: OptimizerSettings | None) -> TrainedModel:
        return TrainedModel(load_model(folder, torch.float32, CPU), settings_of(folder), bound, optimizer)

    packed = [learn_supervised(built(bound, OPTIMIZER)) for bound in bounds]
    loss, norm = packed[0]
    assert norm > 0
    for other in packed[1:]:
        assert other == pytest.approx((loss, norm), rel=1e-5)
    batch = make_batch(7)
    logprob_T = built(BOUND, None).forward(batch)[0]
    assert loss == pytest.approx(-float(logprob_T[batch["mask"]].mean()), rel=1e-5)
    found = four_ranks.run(learn_supervised_on, folder)
    for place in range(len(CUTS)):
        assert sum(found[rank][place][0] for rank in (0, 2)) == pytest.approx(loss, rel=1e-5)
        assert [ranks[place][1] for ranks in found] == pytest.approx([norm] * 4, rel=1e-4)
