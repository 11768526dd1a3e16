"""The memory ledger of a run over devices, against the bytes that its ranks hold."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshloom.config.load import load_settings
from meshloom.config.settings import TrainSettings
from meshloom.plan import sharded_memory
from meshloom.plan.decoder_numbers import DecoderNumbers
from meshloom.plan.device_checks import lay_out
from meshloom.plan.forecast import count_roles
from meshloom.plan.parameters import count_parameters
from meshloom.plan.residency import EVERY, EngineRole, ModelRole, Phase
from meshloom.plan.sharded_memory import engine_holdings, model_holdings
from meshloom.plan.shards import Cut
from meshloom.train.build_on_mesh import build_model
from meshloom.train.load import load_model
from meshloom.weights import reshard
from meshloom.weights.engine_copy import EngineCopy
from tests.mesh_checks import (
    BOUND,
    CPU,
    OPTIMIZER,
    Axes,
    folder_of,
    local_part,
    make_batch,
    mesh_of,
    settings_of,
    weighted,
)
from tests.models import CONFIGS
from tests.ranks import Ranks

SHAPE = {"vocab_size": 96, "num_hidden_layers": 2}
HALVES: dict[str, list[tuple[Axes, list[int]]]] = {
    "fsdp, tp": [((("fsdp", 2),), [0, 1]), ((("tp", 2),), [2, 3])],
    "pp, one": [((("pp", 2),), [0, 1]), ((), [2]), ((), [3])],
    "replicate x fsdp": [((("replicate", 2), ("fsdp", 2)), [0, 1, 2, 3])],
    "fsdp x tp": [((("fsdp", 2), ("tp", 2)), [0, 1, 2, 3])],
    "tp of four": [((("tp", 4),), [0, 1, 2, 3])],
}
_FIELDS = {"pp": "pipeline", "sp": "sequence", "tp": "tensor"}


def role_of(model: DecoderNumbers, cut: Cut, *, lora: int | None = None, trains: bool = True) -> ModelRole:
    """A model in bfloat16, trained or only asked."""
    return ModelRole(
        name="actor",
        model=model,
        cut=cut,
        over_ranks=True,
        computes=(Phase.LOGPROB, Phase.UPDATE) if trains else (Phase.LOGPROB,),
        lends=(Phase.SYNC,),
        width=2,
        trained=lora,
        tokens=BOUND.tokens,
        recompute=False,
        compiled=False,
        chunk_bytes=2**20,
        logit_bytes=4,
    )


def bytes_of(tensors: list[Tensor | None]) -> int:
    """Of the storages of what this rank holds, each once."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local}.values())


def held_on(meshes: list[tuple[Axes, list[int]]], folder: str, lora: bool, trains: bool) -> dict[str, int]:
    """Bytes of this rank: gradients before its update, the rest after it."""
    mesh = mesh_of(meshes)
    settings = settings_of(folder, lora=lora).model_copy(update={"dtype": "bfloat16"})
    model = build_model(settings, mesh, BOUND, OPTIMIZER if trains else None, seed=1)
    batch, found = local_part(make_batch(0), mesh), {}
    parameters = list(model.module.parameters())
    if trains:
        model.forward_backward(batch, weighted, temperature=0.9)
        found["gradients"] = bytes_of([parameter.grad for parameter in parameters])
        model.optim_step(1)
        found["after it"] = bytes_of([parameter.grad for parameter in parameters])
        state = model.optimizer.state_tensors()
        found["optimizer moments"] = bytes_of([value for name, value in state.items() if name.startswith("exp_avg")])
        found["masters"] = bytes_of([value for name, value in state.items() if name.startswith("master/")])
        found["trained"] = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    model.forward(batch, temperature=0.9)
    with torch.no_grad():
        found["weights"] = bytes_of(list(model.module.parameters()))
    return found


def ledger(role: ModelRole, stage: int) -> dict[str, int]:
    return {holding.name: holding.bytes for holding in model_holdings(role, stage)}


def stage_and_cut(meshes: list[tuple[Axes, list[int]]], rank: int) -> tuple[int, Cut]:
    """What the plan calls the place of a rank."""
    axes, ranks = next(mesh for mesh in meshes if rank in mesh[1])
    cut = Cut(**{_FIELDS.get(name, name): size for name, size in axes})
    return ranks.index(rank) * cut.pipeline // len(ranks), cut


@pytest.mark.parametrize("name", HALVES)
def test_ranks_hold_what_the_ledger_says(four_ranks: Ranks, folders: Path, name: str) -> None:
    """Weights, gradients and moments, to 2 %: the plan used to count float32 masters beside weights in bfloat16."""
    family = "qwen2" if name.startswith("pp") else "qwen3"
    model = count_parameters(CONFIGS[family](**SHAPE).to_dict())
    found = four_ranks.run(held_on, HALVES[name], folder_of(folders, family), False, True)
    for rank, held in enumerate(found):
        stage, cut = stage_and_cut(HALVES[name], rank)
        said = ledger(role_of(model, cut), stage)
        for what in ("weights", "gradients", "optimizer moments"):
            assert held[what] == pytest.approx(said[what], rel=0.02), (rank, what)
        assert held["masters"] == held["after it"] == 0
        assert "float32 masters" not in said


def test_ranks_with_adapters_or_that_are_only_asked_hold_weights_as_they_compute(
    four_ranks: Ranks, folders: Path
) -> None:
    model, halves = count_parameters(CONFIGS["qwen3"](**SHAPE).to_dict()), HALVES["replicate x fsdp"]
    folder, cut = folder_of(folders, "qwen3"), Cut(replicate=2, fsdp=2)
    for held in four_ranks.run(held_on, halves, folder, True, True):
        said = ledger(role_of(model, cut, lora=held["trained"]), 0)
        assert held["weights"] == pytest.approx(said["weights"] + said["adapter weights"], rel=0.02)
        for what in ("gradients", "optimizer moments"):
            assert held[what] == pytest.approx(said[what], rel=0.02), what
    for held in four_ranks.run(held_on, halves, folder, False, False):
        assert held["weights"] == pytest.approx(ledger(role_of(model, cut, trains=False), 0)["weights"], rel=0.02)


def test_an_engines_copy_is_as_large_as_the_ledger_says(folders: Path) -> None:
    """With memory while it generates and is filled; and without in between, where its devices train."""
    model = count_parameters(CONFIGS["qwen3"](**SHAPE).to_dict())
    role = EngineRole(model=model, width=2, own_weights=True, over_ranks=True, sequences=4, slot_tokens=64)
    said = next(holding for holding in engine_holdings(role) if holding.name == "engine's weights")
    copy = EngineCopy(load_model(folder_of(folders, "qwen3"), torch.bfloat16, CPU))
    assert copy.num_bytes == pytest.approx(said.bytes, rel=0.02)
    assert said.phases == (Phase.GENERATE, Phase.SYNC)
    copy.empty()
    assert copy.num_bytes == 0


def test_engines_on_devices_of_their_own_keep_copy_cache_and_buffers() -> None:
    assert sharded_memory.BUCKET_BYTES == reshard.BUCKET_BYTES
    model = count_parameters(CONFIGS["qwen3"](**SHAPE).to_dict())
    given = ["model.path=m", "data.train.files=[x]", "reward.function=x", "run_dir=r", "cluster.devices_per_node=2"]
    phases = {}
    for more in ((), ("placement.actor=[0]", "placement.rollout=[1]")):
        settings = load_settings(TrainSettings, None, [*given, *more])
        roles = count_roles(settings, model, lay_out(settings, None, 0).layout, recompute=False)
        holdings = [*engine_holdings(roles.engine), *model_holdings(roles.models["actor"])]
        phases[more] = {(holding.role, holding.name): holding.phases for holding in holdings}
        masters = [holding for holding in holdings if holding.name == "float32 masters"]
        assert not masters, "a run over devices has models on meshes, also of one device"
    together, apart = phases.values()
    sent, received = ("actor", "weights in movement"), ("rollout", "weights in movement")
    assert together[sent] == together[received] == (Phase.SYNC,)
    assert apart[sent] == apart[received] == apart["rollout", "engine's weights"] == EVERY
    assert apart["rollout", "key-value cache"] == EVERY
    assert together["rollout", "key-value cache"] == (Phase.GENERATE,)
