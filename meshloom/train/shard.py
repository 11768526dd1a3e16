"""Sharding a model over ranks: FSDP2, or hybrid sharding where groups of ranks hold the same weights.

Owns: which modules are gathered together, in which arithmetic. Refuses to know: how layers compute, losses. Always holds:
gradients of ranks are summed, never averaged, for a loss's denominators are those of the whole update; sums are made in the
parameters' own width.

Each layer is gathered as it is needed; what is outside of layers (embedding, last norm, head) is gathered once for a pass. A
pass runs inside ``Root``, whose call is what the gathering hangs on: the head is used past its own forward.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from meshloom.config.errors import UserError
from meshloom.train.mesh import TrainMesh

T = TypeVar("T")


class Root(nn.Module):
    """What passes of a sharded model run in; ``module`` is the model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Callable[[], T]) -> T:
        """Call ``run`` while what is outside of layers is gathered. Tensors it returns carry gradients."""
        return run()


def shard(module: nn.Module, mesh: TrainMesh, *, compute: torch.dtype, reshard_after_forward: bool = True) -> Root:
    """Shard a model's parameters, in place; what they hold, on any device or none (``meta``), stays as it is.

    Args:
        module: a causal language model, cut by ``tp`` already where it is.
        mesh: over its axes ``replicate``, ``fsdp`` and ``sp``.
        compute: dtype in which layers compute; parameters that are wider are rounded as they are gathered.
        reshard_after_forward: gather a layer again for the backward pass; false keeps it: less exchange, more memory.

    Raises:
        UserError: if the model has no layers of the usual kind.
    """
    layers = [child for child in module.modules() if isinstance(child, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(
            f"{type(module).__name__} has no layers that can be sharded one by one", where="parallel", fix="one device"
        )
    widest = max((p.dtype for p in module.parameters() if p.requires_grad), key=lambda d: d.itemsize, default=compute)
    narrowed = widest.itemsize > compute.itemsize
    policy = MixedPrecisionPolicy(
        param_dtype=compute if narrowed else None,
        reduce_dtype=widest if narrowed else None,
        cast_forward_inputs=False,
    )
    root = Root(module)
    for layer in layers:
        fully_shard(layer, mesh=mesh.data_mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(root, mesh=mesh.data_mesh, mp_policy=policy, reshard_after_forward=False)
    for part in parts_of(root):
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)
    return root


def gather_ahead(root: Root, layers: Sequence[nn.Module]) -> None:
    """Let a backward pass through some layers gather each of them while the one after it computes, and nothing else.

    By itself it goes by the order of the last pass forward, which may have been through other layers.

    Args:
        root: the sharded model.
        layers: some neighbouring ones of it, in the order of the pass forward.
    """
    parts = [part for part in layers if isinstance(part, FSDPModule)]
    # What is gathered already is not gathered again: the first has nothing ahead of it.
    for ahead, part in zip([parts[0], *parts], [*parts, root], strict=True):
        part.set_modules_to_backward_prefetch([ahead])


def parts_of(root: Root) -> list[FSDPModule]:
    """The modules that are gathered one by one."""
    return [child for child in root.modules() if isinstance(child, FSDPModule)]


def release(root: Root) -> None:
    """Give back what is gathered still, so that parameters are the parts that this rank holds."""
    for part in parts_of(root):
        part.reshard()
