"""What ranks do in tests of movements between layouts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshloom.config.errors import RunFault
from meshloom.weights.layouts import Axis, Box, Grid, boxes
from meshloom.weights.reshard import Resharded, Resharder
from meshloom.weights.shards import PlacedTaker, TensorGiver, TensorTaker
from meshloom.weights.tracing import watch_loading
from meshloom.weights.transport import Posted

CPU = torch.device("cpu")
Axes = tuple[tuple[str, int], ...]
COLUMNS, ROWS = ("q", "k", "up"), ("o", "down")


class Block(nn.Module):
    """A layer; rows that most numbers of shards do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(12, 20)
        self.k = nn.Linear(12, 4, bias=False)
        self.o = nn.Linear(20, 12, bias=False)
        self.up, self.down = nn.Linear(12, 36, bias=False), nn.Linear(36, 12)
        self.norm = nn.LayerNorm(12, bias=False)


class Whole(nn.Module):
    """A model with a tied table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(29, 12)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(12, 29, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.randn(1))


@cache
def values() -> dict[str, Tensor]:
    """The whole tensors, tied ones once."""
    return {name: tensor.detach().clone() for name, tensor in Whole().named_parameters()}


@dataclass(frozen=True)
class Case:
    """A movement.

    Args:
        actor: axes of the mesh that gives, over the ranks ``giving``.
        rollout: axes ``dp`` and ``tp`` of those that take.
        dtype: of the engine.
    """

    actor: Axes
    giving: tuple[int, ...]
    rollout: Axes
    taking: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    bucket_bytes: int = 700
    together: bool = True

    def __str__(self) -> str:
        def named(axes: Axes, ranks: tuple[int, ...]) -> str:
            return "x".join(f"{name}{size}" for name, size in axes) + "@" + "".join(map(str, ranks))

        return f"{named(self.actor, self.giving)}-{named(self.rollout, self.taking)}"


@dataclass(frozen=True)
class Found:
    """What a movement did on a rank; ``wrong`` names tensors that are not what they should be."""

    wrong: list[str]
    buffer_bytes: int
    peak_bytes: int
    moved: Resharded
    held_bytes: int


def sharded(axes: Axes, ranks: Sequence[int]) -> nn.Module | None:
    """The model cut by torch's own parallelism; none on other ranks. Due on all ranks of the world."""
    names, sizes = zip(*axes, strict=True)
    mesh = DeviceMesh("cpu", torch.tensor(ranks).view(sizes), mesh_dim_names=names)
    if dist.get_rank() not in ranks:
        return None
    module = Whole()
    if "tp" in names:
        tensor = mesh["tp"] if len(names) > 1 else mesh
        for layer in module.layers:
            plan = dict.fromkeys(COLUMNS, ColwiseParallel()) | dict.fromkeys(ROWS, RowwiseParallel())
            parallelize_module(layer, tensor, plan)
    data = tuple(name for name in names if name != "tp")
    if data:
        over = mesh if len(data) == len(names) else mesh[data if len(data) > 1 else data[0]]
        for layer in module.layers:
            fully_shard(layer, mesh=over)
        fully_shard(module, mesh=over)
    return module


def needed(case: Case, name: str, shape: Sequence[int]) -> dict[int, Box]:
    """What each engine needs of a tensor."""
    names, sizes = zip(*case.rollout, strict=True)
    kind = name.split(".")[-2] if "." in name else ""
    cut = {**dict.fromkeys(COLUMNS, 0), **dict.fromkeys(ROWS, 1)}.get(kind)
    if cut is not None and cut >= len(shape):
        cut = None  # the bias of a layer that is cut by its inputs
    cuts = [Axis(names.index("tp"), cut)] if "tp" in names and cut is not None else []
    return boxes(shape, Grid(sizes, case.taking), cuts)


def taker(case: Case) -> TensorTaker | None:
    rank = dist.get_rank()
    if rank not in case.taking:
        return None
    found = {}
    for name, value in values().items():
        box = needed(case, name, value.shape)[rank]
        found[name] = (tuple(value.shape), box, torch.full(box.shape, torch.nan, dtype=case.dtype))
    return TensorTaker(found)


def giver(module: nn.Module | None) -> TensorGiver | None:
    if module is None:
        return None
    # As models give their tensors: tied ones under both names.
    return TensorGiver(lambda: module.named_parameters(remove_duplicate=False))


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.count: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {id_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (key := id_of(tensor)) not in given - set(self.count):
                self._hold(tensor, key)
        return out

    def _hold(self, tensor: Tensor, key: int) -> None:
        size = tensor.untyped_storage().nbytes()
        if not self.count.get(key):
            self.now += size
            self.peak = max(self.peak, self.now)
        self.count[key] = self.count.get(key, 0) + 1
        finalize(tensor, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self.count[key] -= 1
        if not self.count[key]:
            del self.count[key]
            self.now -= size


def id_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def move_all(cases: Sequence[Case]) -> list[Found | None]:
    """Every movement, twice with values that changed between; none where this rank takes no part."""
    found: list[Found | None] = []
    for case in cases:
        module = sharded(case.actor, case.giving)
        group = dist.new_group(sorted({*case.giving, *case.taking}))
        rank = dist.get_rank()
        if rank not in case.giving and rank not in case.taking:
            found.append(None)
            continue
        found.append(_move(case, module, group))
    return found


def _move(case: Case, module: nn.Module | None, group: dist.ProcessGroup) -> Found:
    to = taker(case)
    resharder = Resharder(
        giver(module), to, group=group, device=CPU, bucket_bytes=case.bucket_bytes, together=case.together
    )
    resharder.move(1)
    expected = {name: value + 1 for name, value in values().items()}
    if module is not None:
        with torch.no_grad():
            for parameter in module.parameters():
                (parameter.to_local() if hasattr(parameter, "to_local") else parameter).add_(1)
    with LiveBytes() as live:
        moved = resharder.move(2)
    wrong, held = [], 0
    if to is not None:
        for name, value in expected.items():
            box = needed(case, name, value.shape)[dist.get_rank()]
            ((_, place),) = to.views(name, box)
            held += place.nbytes
            if not torch.equal(place, box.of(value, Box.whole(value.shape)).to(case.dtype)):
                wrong.append(name)
    return Found(wrong, resharder.buffer_bytes, live.peak, moved, held)


TWO = Case((("fsdp", 2),), (0, 1), (("tp", 2),), (0, 1))


def fault_of(make: Callable[[], Any]) -> str:
    """The error that something raises."""
    try:
        make()
    except RunFault as fault:
        return str(fault)
    return "none"


def two_sides(changed: Callable[[TensorTaker], TensorTaker]) -> tuple[TensorGiver | None, TensorTaker | None]:
    """Rank 0 gives everything whole; ranks 1 and 2 take it, the latter with a change."""
    rank, tensors = dist.get_rank(), values()
    if rank == 0:
        return TensorGiver(tensors.items), None
    whole = TensorTaker.whole((name, torch.empty_like(tensor)) for name, tensor in tensors.items())
    return None, (changed(whole) if rank == 2 else whole)


def without(name: str) -> Callable[[TensorTaker], TensorTaker]:
    return lambda side: TensorTaker({n: held for n, held in side._held.items() if n != name})


def other_shape(name: str) -> Callable[[TensorTaker], TensorTaker]:
    def change(side: TensorTaker) -> TensorTaker:
        return TensorTaker(side._held | {name: ((5, 2), Box.whole((5, 2)), torch.empty(5, 2))})

    return change


def other_dtype(name: str) -> Callable[[TensorTaker], TensorTaker]:
    def change(side: TensorTaker) -> TensorTaker:
        shape, box, tensor = side._held[name]
        return TensorTaker(side._held | {name: (shape, box, tensor.double())})

    return change


def more(name: str) -> Callable[[TensorTaker], TensorTaker]:
    return lambda side: TensorTaker(side._held | {name: ((3,), Box.whole((3,)), torch.empty(3))})


def disagreements() -> list[str]:
    """What each rank is told of sides that do not fit."""
    group = dist.new_group([0, 1, 2])
    if dist.get_rank() == 3:
        return []
    found = []
    for change in (other_shape("layers.1.q.weight"), other_dtype("layers.0.down.bias"), more("layers.7.q.weight")):
        found.append(fault_of(lambda: Resharder(*two_sides(change), group=group, device=CPU)))  # noqa: B023
    with_less = without("scale")
    sides = two_sides(with_less)
    if dist.get_rank() == 1:
        sides = None, with_less(sides[1])
    found.append(fault_of(lambda: Resharder(*sides, group=group, device=CPU)))
    resharder = Resharder(*two_sides(lambda side: side), group=group, device=CPU)
    found.append(fault_of(lambda: resharder.move(5 if dist.get_rank() else 4)))
    return found


def flipped_bit(where: str, together: bool) -> str:
    """What each rank is told when one bit of a tensor changes, on its way to a rank or in the place where it arrived; and of a
    movement after that."""
    case = Case((("fsdp", 2),), (0, 1), (("dp", 2),), (2, 3), bucket_bytes=2000, together=together)
    module, to = sharded(case.actor, case.giving), taker(case)
    resharder = Resharder(giver(module), to, device=CPU, bucket_bytes=case.bucket_bytes, together=together)
    name = "layers.1.down.weight"
    number = [layout.name for layout in resharder.agreed.layouts].index(name)
    if dist.get_rank() == 3 and where == "link":
        post = resharder._transport.post

        class Noisy(Posted):
            def wait(self) -> None:
                super().wait()
                for message, buffer in self.messages:  # type: ignore[attr-defined]
                    start = 0
                    for piece in message.pieces:
                        if piece.tensor == number:
                            buffer[start + 5] ^= 16
                        start += piece.num_bytes

        def noisy(messages: Sequence[Any]) -> Posted:
            posted = Noisy(post(messages).works)
            object.__setattr__(posted, "messages", messages)
            return posted

        resharder._transport.post = noisy
    if dist.get_rank() == 3 and where == "place":

        class Lossy:
            """A place that forgets what was put there."""

            def begin(self) -> None: ...

            def views(self, asked: str, box: Box) -> Any:
                for part, place in to.views(asked, box):
                    yield part, _Forgets(place) if asked == name else place

        resharder._taker = Lossy()
    fault = fault_of(lambda: resharder.move(1))
    resharder._transport.post = type(resharder._transport).post.__get__(resharder._transport)
    resharder._taker = to
    again = fault_of(lambda: resharder.move(2))
    return f"{fault} / {again}"


class _Forgets(Tensor):
    """A tensor that keeps one of its bits whatever is copied there."""

    @staticmethod
    def __new__(cls, tensor: Tensor) -> "_Forgets":
        return tensor.as_subclass(cls)

    def copy_(self, other: Tensor) -> "_Forgets":
        plain = self.as_subclass(Tensor)
        plain.copy_(other)
        plain.view(-1).view(torch.uint8)[:1] ^= 1
        return self


def through_places() -> list[str]:
    """From sharded parameters to an engine that keeps queries and keys in one matrix, by places that its loaders showed."""
    case = Case((("fsdp", 3),), (0, 1, 2), (("dp", 1),), (3,), bucket_bytes=500)
    module = sharded(case.actor, case.giving)
    rank = dist.get_rank()
    stacked = {name: torch.empty(24, 12) for name in ("layers.0.qk", "layers.1.qk")}
    others: dict[str, Tensor] = {}

    def load(tensors: Any) -> None:
        for name, tensor in tensors:
            layer, _, kind = name.rpartition(".")
            block, _, leaf = layer.rpartition(".")
            if leaf in ("q", "k") and kind == "weight":
                rows = slice(0, 20) if leaf == "q" else slice(20, 24)
                stacked[f"{block}.qk"][rows].copy_(tensor)
            elif name == "table.weight":
                others[name] = torch.zeros(32, 12)  # padded
                others[name][:29].copy_(tensor)
            else:
                others[name] = torch.empty_like(tensor)
                others[name].copy_(tensor)

    to = None
    if rank == 3:
        zeros = {name: torch.zeros_like(value) for name, value in values().items()}
        to = PlacedTaker(watch_loading(load, zeros.items()), {name: tuple(v.shape) for name, v in values().items()})
    Resharder(giver(module), to, device=CPU, bucket_bytes=case.bucket_bytes).move(1)
    if rank != 3:
        return []
    whole = values()
    wrong = [
        name
        for name, tensor in stacked.items()
        if not torch.equal(tensor, torch.cat([whole[f"{name[:-3]}.q.weight"], whole[f"{name[:-3]}.k.weight"]]))
    ]
    wrong += [name for name, tensor in others.items() if not torch.equal(tensor[: len(whole[name])], whole[name])]
    return [*wrong, f"{len(others)} others"]
