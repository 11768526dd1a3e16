"""The model that an engine of a run over devices samples with: a copy of its own, whole or this device's part.

Owns: who shares a replica, and the copy before it has values. Refuses to know: engines, movements. Always holds: process groups
are made by all ranks of the world at once; no device ever has more of a model than its part.
"""

from pathlib import Path

import torch
import torch.distributed as dist

from meshloom.config.settings import ModelSettings
from meshloom.plan.layout import RoleLayout
from meshloom.rollout.cut_model import cut_for_engine, give_memory
from meshloom.rollout.peers import OverRanks
from meshloom.train.attention import use_layouts
from meshloom.train.load import load_model, pick_dtype
from meshloom.train.load_sharded import build_empty, load_whole
from meshloom.train.threads import fit_threads
from meshloom.weights.engine_copy import EngineCopy


def build_copy(
    settings: ModelSettings, rollout: RoleLayout | None, rank: int, device: torch.device
) -> EngineCopy | None:
    """The copy of this rank's engine, if it has one; due on all ranks of the world. The first movement fills it with the
    actor's weights.

    Args:
        settings: of the model.
        rollout: where the engines are.
        rank: of this process.
        device: of this process.

    Raises:
        UserError: if the model cannot be loaded, or cut so.
    """
    if rollout is None:
        return None
    ranks = rollout.ranks
    peers = peers_of(ranks, rollout.mesh.size("tp"), rank)
    if rank not in ranks:
        return None
    dtype = pick_dtype(settings.dtype, device)
    if peers is None:
        return EngineCopy(load_model(settings.path, dtype, device).requires_grad_(False))
    return cut_copy(Path(settings.path), peers, dtype, device)


def peers_of(ranks: list[int], tensor: int, rank: int) -> OverRanks | None:
    """Those who share a replica with a rank, if each replica is of several; due on all ranks of the world.

    Args:
        ranks: of all replicas.
        tensor: ranks of a replica.
        rank: of this process.
    """
    if tensor == 1:
        return None
    found: OverRanks | None = None
    for at in range(0, len(ranks), tensor):
        members = ranks[at : at + tensor]
        group = dist.new_group(members)
        if rank in members:
            found = OverRanks(group)
    return found


def cut_copy(folder: Path, peers: OverRanks, dtype: torch.dtype, device: torch.device) -> EngineCopy:
    """This rank's part of a model, with memory and without values.

    Raises:
        UserError: as ``cut_for_engine``.
    """
    module = build_empty(folder, dtype) or load_whole(folder, dtype)
    held = cut_for_engine(module, peers)
    give_memory(module, device)
    use_layouts(module)
    fit_threads(device)
    module.requires_grad_(False)
    return EngineCopy(module.eval(), held, peers)
