"""The parts of a model between its device and a shelf: a state for each part, and the moves between the states.

Owns: which storages a part is, when they move, and the proof that they are where the state says. Refuses to know: phases and
who decides (``meshloom.loop.residents``), how bytes are copied (``shelves``). Always holds: a part that is away cannot be
computed with: a pass or an update of the model is an error that names it; parameters stay the same objects, so tied weights,
adapters, matrices that lie side by side, and an engine's views of them have their values again when the part is back.

A part that did not change since it was brought is dropped, not copied. Of sharded parameters each rank moves its own shard.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from meshloom.config.errors import RunFault
from meshloom.plan.residency import Residency
from meshloom.plan.stays import Part
from meshloom.train.mesh_model import MeshModel
from meshloom.train.model import TrainedModel
from meshloom.train.optimizer import Optimizer
from meshloom.train.shelves import Arrival, DiskShelf, HostShelf, Shelf, empty, own_storages

Tag = tuple[int, tuple[tuple[int, int], ...]]
"""Updates made, and where each storage is with how many bytes: the same means unchanged."""


class ResidentModel:
    """A model whose parts may be away.

    Args:
        role: whose model it is, for messages.
        model: on its device, as are its masters and moments.
        places: where each part that moves goes; parts that are not named stay.
        folder: for files of parts that go to disk.
        rank: of this process among those that share the folder.

    ``at`` says where each part is.
    """

    def __init__(
        self, role: str, model: TrainedModel, places: Mapping[Part, Residency], *, folder: Path, rank: int = 0
    ) -> None:
        self.role, self.model = role, model
        self.at: dict[Part, Residency] = dict.fromkeys(Part, Residency.DEVICE)
        self._shelves = {
            part: _shelf(place, model.device, folder / f"{role}.{part}.{rank}") for part, place in places.items()
        }
        self._away: dict[Part, list[list[UntypedStorage]]] = {}
        self._kept: dict[Part, Tag] = {}
        self._arriving: dict[Part, Arrival] = {}
        self._gradients_are_away = False
        self._layers = _layers(model)
        self._watch_passes()
        if Part.OPTIMIZER in places and model.optimizer is not None:
            model.optimizer.adamw.register_step_pre_hook(lambda *_: self._need(Part.OPTIMIZER, None))

    @torch.no_grad()
    def park(self, part: Part) -> None:
        """Move a part away; copied only if it changed since it was brought. Its memory is free for this process at once, for
        others after ``settle``.

        Raises:
            RunFault: if it is not on the device, or a file cannot be written.
        """
        self.require(part, Residency.DEVICE)
        self.wait(part)
        _reshard(self.model.module)
        own_storages(local(tensor) for _, tensor in _tensors(self.model, part))
        groups = self._groups(part)
        if self._kept.get(part) == self._tag(groups):
            empty(groups)
        else:
            self._shelves[part].put(groups)
        self._away[part] = groups
        optimizer = self.model.optimizer
        self._gradients_are_away = self._gradients_are_away or (
            part is Part.OPTIMIZER and optimizer is not None and any(_gradients(optimizer))
        )
        self.at[part] = self._shelves[part].at

    @torch.no_grad()
    def fetch(self, part: Part) -> None:
        """Begin to bring a part back. Passes and updates wait for what they need of it; others must ``wait``.

        Raises:
            RunFault: if it is not away.
        """
        if self.at[part] is Residency.DEVICE:
            raise self._fault(part, "it is on the device already")
        self.require(part, self.at[part])
        groups = self._away.pop(part)
        self._arriving[part] = self._shelves[part].take(groups)
        self._kept[part] = self._tag(groups)
        self._gradients_are_away = self._gradients_are_away and part is not Part.OPTIMIZER
        self.at[part] = Residency.DEVICE

    def changed(self, part: Part) -> None:
        """A part that is on the device has other values, which no update made: it is copied when it moves away."""
        self._kept.pop(part, None)

    def held_bytes(self, part: Part) -> int:
        """That a part has on the device now."""
        return sum(storage.nbytes() for group in self._groups(part) for storage in group)

    def wait(self, part: Part) -> None:
        """Let everything that is computed from now on see a part that was fetched."""
        if (arriving := self._arriving.pop(part, None)) is not None:
            arriving.wait()

    def settle(self) -> None:
        """Wait until the device's memory of what was parked is free."""
        for shelf in self._shelves.values():
            shelf.settle()

    def require(self, part: Part, place: Residency) -> None:
        """Do nothing if a part is where it should be, by its state and by its bytes.

        Raises:
            RunFault: that names the part and the first tensor that is elsewhere.
        """
        if self.at[part] is not place:
            raise self._fault(part, f"it is on the {self.at[part]}, not on the {place}")
        here = place is Residency.DEVICE
        if any(storage.nbytes() for group in self._away.get(part, ()) for storage in group):
            raise self._fault(part, "something that was moved away has bytes on the device again")
        # Gradients may be made while the rest of the optimizer is away.
        for name, tensor in _tensors(self.model, part, gradients=here):
            if (local(tensor).untyped_storage().nbytes() > 0) is not here:
                raise self._fault(part, f"{name} is {'not ' if here else 'still '}on the device")

    def close(self) -> None:
        """Give up host memory and files. What is away is lost: computing with it stays an error."""
        for shelf in self._shelves.values():
            shelf.close()

    def _watch_passes(self) -> None:
        """Before a pass, what is in no layer must be there; before each layer, that layer. A pass of a sharded model begins
        with the gathering of shards."""

        def before(group: int | None) -> Callable[..., None]:
            return lambda *_: self._need(Part.PARAMETERS, group)

        layered = bool(self._layers)
        outermost = self.model.root if isinstance(self.model, MeshModel) else self.model.decoder
        outermost.register_forward_pre_hook(before(0 if layered else None), prepend=True)
        for number, layer in enumerate(self._layers, 1):
            layer.register_forward_pre_hook(before(number), prepend=True)

    def _need(self, part: Part, group: int | None) -> None:
        if torch.is_grad_enabled() and self._gradients_are_away:
            raise self._fault(Part.OPTIMIZER, "a gradient is to be added to one that is away")
        if self.at[part] is not Residency.DEVICE:
            raise self._fault(part, f"it is computed with while it is on the {self.at[part]}")
        if (arriving := self._arriving.get(part)) is not None:
            arriving.wait(group)

    def _groups(self, part: Part) -> list[list[UntypedStorage]]:
        """Storages of a part, each once: what is in no layer first, then layer by layer."""
        layer_of = {id(p): number for number, layer in enumerate(self._layers, 1) for p in layer.parameters()}
        groups: list[list[UntypedStorage]] = [[] for _ in range(len(self._layers) + 1)]
        seen: set[int] = set()
        for _, tensor in _tensors(self.model, part):
            storage = local(tensor).untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                groups[layer_of.get(id(tensor), 0)].append(storage)
        return groups

    def _tag(self, groups: list[list[UntypedStorage]]) -> Tag:
        updates = 0 if self.model.optimizer is None else self.model.optimizer.updates
        return updates, tuple((storage.data_ptr(), storage.nbytes()) for group in groups for storage in group)

    def _fault(self, part: Part, why: str) -> RunFault:
        return RunFault(f"the {part} of the {self.role} are not where the plan has them", where="offload", why=why)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: itself, or the shard in it."""
    with torch.no_grad():  # which gives the shard itself, not a view of it
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shelf(place: Residency, device: torch.device, file: Path) -> Shelf:
    return DiskShelf(device, file) if place is Residency.DISK else HostShelf(device)


def _layers(model: TrainedModel) -> list[nn.Module]:
    """Layers that wait each for their own weights; none where shards are gathered ahead of the layer that needs them."""
    if any(isinstance(p, DTensor) for p in model.module.parameters()):
        return []
    return [module for module in model.decoder.modules() if isinstance(module, GradientCheckpointingLayer)]


def _reshard(module: nn.Module) -> None:
    """Give up what is gathered of sharded parameters, so that the shards are the parameters."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def _tensors(model: TrainedModel, part: Part, *, gradients: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a part, by name; step counts, a number each, stay where they are."""
    found: Iterable[tuple[str, Tensor]] = ()
    if part is Part.PARAMETERS:
        found = model.module.named_parameters()
    elif model.optimizer is not None:
        more = _gradients(model.optimizer) if gradients else ()
        found = chain(model.optimizer.state_tensors().items(), more)
    yield from ((name, tensor) for name, tensor in found if tensor.numel() > 1)


def _gradients(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, master in optimizer.masters.items():
        parameter = optimizer.parameters[name]
        if parameter.grad is not None:
            yield f"gradient of {name}", parameter.grad
        if master is not parameter and master.grad is not None:
            yield f"gradient of master/{name}", master.grad
