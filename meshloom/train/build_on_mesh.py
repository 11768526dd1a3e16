"""A model on a mesh, from its folder.

Owns: the order in which a model is cut: adapters, tensor parallelism, sharding, weights, optimizer. Refuses to know: roles,
runs. Always holds: the same folder and settings give the same weights on every mesh; a cut that attaches to no layer is an
error.
"""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from meshloom.config.errors import UserError
from meshloom.config.settings import ModelSettings, OptimizerSettings
from meshloom.train.attention import PackedAttention, use_layouts
from meshloom.train.head import OutputHead, check_logits, decoder_of, plain_model
from meshloom.train.interleaved import InterleavedModel
from meshloom.train.load import add_lora, load_model, pick_dtype
from meshloom.train.load_sharded import build_empty, fill, source_names, stand_ins
from meshloom.train.mesh import TrainMesh
from meshloom.train.mesh_model import MeshModel
from meshloom.train.model import MicrobatchBound
from meshloom.train.pipeline import PipelineModel
from meshloom.train.shard import Root, release, shard
from meshloom.train.stages import keep_stages
from meshloom.train.tensor_parallel import TensorCut, cut_layers
from meshloom.train.threads import fit_threads
from meshloom.train.value_head import is_critic, load_value_model


def build_model(
    settings: ModelSettings,
    mesh: TrainMesh,
    bound: MicrobatchBound,
    optimizer: OptimizerSettings | None,
    *,
    seed: int = 0,
    path: str | Path | None = None,
    reshard_after_forward: bool = True,
    scalar_head: bool = False,
    stages_per_device: int = 1,
) -> MeshModel:
    """A model over the ranks of a mesh; due on all of them at once.

    Args:
        settings: of the model.
        mesh: axes, and this process's place and device.
        bound: of a microbatch.
        optimizer: none for a model that is only asked.
        seed: of adapters' first values, the same on all ranks.
        path: folder of the weights, if it is not ``settings.path``.
        reshard_after_forward: see ``train.shard.shard``.
        scalar_head: whether it is a critic (``train.value_head``); a fresh head is the same on all meshes.
        stages_per_device: of a pipeline; more than one are interleaved (``train.interleaved``).

    Raises:
        UserError: if the folder cannot be used, or the model cannot be cut so.
    """
    compute = pick_dtype(settings.dtype, mesh.device)
    # What is trained is float32 and rounded as it is gathered; what is not is as narrow as it computes.
    trains_all = optimizer is not None and settings.lora is None
    held = torch.promote_types(compute, torch.float32) if trains_all else compute
    folder = Path(path or settings.path)
    setting = "critic.model" if scalar_head else "model.path"
    plain = build_empty(folder, held, scalar_head=scalar_head, setting=setting)
    if plain is None:
        whole = load_value_model if scalar_head else load_model
        plain = whole(folder, compute, torch.device("cpu")).to(held)
    _refuse_heads(plain, mesh)
    use_layouts(plain)
    fit_threads(mesh.device)
    module: nn.Module = plain
    if settings.lora is not None:
        with stand_ins(plain):
            module = add_lora(plain, settings.lora, seed)
        if optimizer is not None:
            _widen_adapters(module)
    if optimizer is None:
        module.requires_grad_(False)
    tied = keep_stages(plain, mesh, stages_per_device) if mesh.size("pp") > 1 else []
    cut = cut_layers(plain, mesh, within=module) if mesh.size("tp") > 1 else TensorCut()
    root = shard(module, mesh, compute=compute, reshard_after_forward=reshard_after_forward)
    fill(module, list(source_names(module)), folder, mesh)
    _rehearse(root, mesh, compute)
    kind = PipelineModel if mesh.size("pp") > 1 else MeshModel
    if mesh.size("pp") > 1 and stages_per_device > 1:
        kind = partial(InterleavedModel, stages_per_device=stages_per_device)
    return kind(root, settings, bound, optimizer, mesh, compute=compute, cut=cut, tied=tied)


def _refuse_heads(model: PreTrainedModel, mesh: TrainMesh) -> None:
    """Refuse heads that do not go into the ranks that share them."""
    config = model.config.get_text_config()
    tensor, both = mesh.size("tp"), mesh.size("tp") * mesh.size("sp")
    keys = config.num_key_value_heads
    for ranks, setting in ((tensor, "tensor"), (both, "sequence")):
        if config.num_attention_heads % ranks or (keys % ranks and ranks % keys):
            raise UserError(
                f"{config.num_attention_heads} heads, {keys} of keys and values, do not go into {ranks} ranks",
                where=f"parallel.actor.{setting}",
                why="each rank has some heads of a layer",
                fix="a number that divides both, or is a multiple of the heads of keys",
            )


def _widen_adapters(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


@torch.no_grad()
def _rehearse(root: Root, mesh: TrainMesh, compute: torch.dtype) -> None:
    """A first pass over a few tokens: parts take their places in memory, and the head is compared with the model's own, where
    this rank has all of it.

    Raises:
        UserError: if the model changes its logits in a way that is not known here.
    """
    model, decoder = plain_model(root.module), decoder_of(root.module)
    # Under tp a rank has a piece of the tokens between cut layers.
    tokens = 4 * mesh.size("tp")
    ids = torch.arange(tokens, device=mesh.device)[None] % 4
    given = {"input_ids": ids}
    if mesh.place["pp"] > 0:
        width = decoder.config.get_text_config().hidden_size
        given = {"inputs_embeds": torch.zeros(1, 4, width, dtype=compute, device=mesh.device)}
    inputs = {**given, "position_ids": ids, "layout": PackedAttention([tokens]), "use_cache": False}
    if mesh.groups.pp is not None:
        # All ranks of a group must meet once before two of them exchange anything alone.
        dist.all_reduce(torch.zeros(1, device=mesh.device), group=mesh.groups.pp)
    if mesh.size("pp") > 1 or mesh.size("tp") > 1 or is_critic(model):
        root(lambda: decoder(**inputs).last_hidden_state)
        release(root)
        return

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        theirs = model(**inputs).logits[0].float()
        return theirs, OutputHead(root.module).logits(decoder(**inputs).last_hidden_state[0]).float()

    theirs, ours = root(run)
    release(root)
    check_logits(model, theirs, ours)
