"""One movement of weights from a trainer to an engine of the same process: direct copies where they are possible, the engine's
own loaders elsewhere, and the proof that what was sent is there.

Owns: the choice of the way, the copies, the comparison. Refuses to know: schedules, which engine receives, how a model is
trained. Always holds: no weight is copied through the host or a third place; after a movement each tensor's checksum at the
receiver equals the sender's, or the run stops and names the tensor.

The first movement goes through the receiver's loaders, and shows where they put what (``tracing``). If copying by that
table gives bit for bit the same, later movements are nothing but copies. A receiver whose loaders pack weights into another
form has no such table: there every movement goes through the loaders, it is checked that they took every tensor whole, and
the log-probability probe (``probe``) is what proves the result.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from meshloom.config.errors import RunFault
from meshloom.weights.checksum import Checksums
from meshloom.weights.copies import Copier
from meshloom.weights.manifest import Manifest
from meshloom.weights.tracing import PlaceTable, unlike_loaders, watch_loading

_BUCKET_BYTES = 1 << 28
"""Copied in one call, while the processor gathers the next. Tensors that are made on the way (merged adapters) are alive for
one bucket."""

Tensors = Iterable[tuple[str, Tensor]]


class Source(Protocol):
    """Gives the weights: see ``source.WeightsSource``."""

    def __call__(self) -> Iterator[tuple[str, Tensor]]: ...

    @property
    def tied(self) -> Mapping[str, str]: ...


class Receiver(Protocol):
    """Takes the weights: an engine's model in this process."""

    keeps_layout: bool
    """Whether parameters stay as the loaders fill them; false where they are packed afterwards."""

    def model(self) -> nn.Module:
        """The module whose parameters hold the weights."""
        ...

    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Let the model's own loaders put tensors into its parameters, and nothing else."""
        ...

    def reload(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Load tensors the engine's own way, packing included."""
        ...


@dataclass(frozen=True, kw_only=True)
class Moved:
    """A movement that is done.

    Args:
        num_tensors, num_bytes: of the source; tied tensors count once.
        seconds: of the whole movement, checksums included.
        direct: by copies alone; false: through the receiver's loaders.
        checksum: of all tensors, in hexadecimal; empty where the receiver packs weights into another form.
    """

    num_tensors: int
    num_bytes: int
    seconds: float
    direct: bool
    checksum: str


@dataclass(frozen=True)
class DirectCopy:
    """Copies by a table of places.

    Args:
        table: where each tensor belongs.
        manifest: the tensors that must come.
        copier: copies each bucket under its number.
    """

    table: PlaceTable
    manifest: Manifest
    copier: Copier

    def run(self, tensors: Tensors) -> None:
        """Copy, without checksums. Nothing waits for the device."""
        for number, _, parts, targets in self._buckets(tensors):
            self.copier.copy(number, parts, targets)

    def run_and_verify(self, tensors: Tensors) -> str:
        """Copy, and compare what was sent with what is there, each tensor by its checksum. Waits for the device once.

        Returns:
            The checksum of all.

        Raises:
            RunFault: that names the tensors that did not arrive.
        """
        names: list[str] = []
        sums: list[tuple[Tensor, Tensor]] = []
        for number, copied, parts, targets in self._buckets(tensors):
            names += copied
            sums.append(self.copier.copy_and_sum(number, parts, targets))
        before, after = (Checksums(tuple(names), torch.cat(values)) for values in zip(*sums, strict=True))
        if lost := before.differing(after):
            raise not_there(lost, "its checksum at the engine is not the trainer's")
        return before.total()

    def _buckets(self, tensors: Tensors) -> Iterator[tuple[int, list[str], list[Tensor], list[Tensor]]]:
        """Number, names, parts and their places of each bucket; a part that is wider than its place is rounded."""
        for target, value in self.table.fills:
            target.fill_(value)
        for number, bucket in enumerate(_buckets(_checked(tensors, self.manifest))):
            placed = [(name, place, tensor) for name, tensor in bucket for place in self.table.places[name]]
            parts = [place.part(tensor).to(place.target.dtype) for _, place, tensor in placed]
            yield number, [name for name, _, _ in placed], parts, [place.target for _, place, _ in placed]


class Movement:
    """Moves weights from one source to one receiver, again and again.

    Args:
        source: gives full tensors under the names of the model's folder.

    ``last`` is the newest movement, ``direct`` the way of copies once the first movement found one, ``not_direct`` the
    names of tensors that stood in its way.
    """

    def __init__(self, source: Source) -> None:
        self.last: Moved | None = None
        self.direct: DirectCopy | None = None
        self.not_direct: list[str] = []
        self._source = source
        self._manifest: Manifest | None = None

    def move(self, receiver: Receiver) -> Moved:
        """Move everything once.

        Raises:
            RunFault: that names the tensor, if one is missing, has another shape or dtype, or did not arrive.
        """
        began = time.monotonic()
        with torch.no_grad():
            if self._manifest is None:
                self._manifest = Manifest.of(self._source())
                if receiver.keeps_layout:
                    self._find_direct_way(receiver, self._manifest)
            if self.direct is not None:
                checksum = self.direct.run_and_verify(self._source())
            else:
                checksum = ""
                self._through_loaders(receiver, self._manifest)
        seconds = time.monotonic() - began
        count, num_bytes = len(self._manifest.specs), self._manifest.num_bytes
        self.last = Moved(
            num_tensors=count, num_bytes=num_bytes, seconds=seconds, direct=self.direct is not None, checksum=checksum
        )
        return self.last

    def _find_direct_way(self, receiver: Receiver, manifest: Manifest) -> None:
        """Load once through the model's own loaders, and see whether copying by what they did gives the same."""
        table = watch_loading(receiver.load, _checked(self._source(), manifest))
        self.not_direct = table.incomplete(manifest)
        if not self.not_direct:
            gpu = any(parameter.is_cuda for parameter in receiver.model().parameters())
            direct = DirectCopy(table, manifest, Copier(kernels=gpu))
            self.not_direct = unlike_loaders(receiver.model(), lambda: direct.run(self._source()))
            if not self.not_direct:
                self.direct = direct

    def _through_loaders(self, receiver: Receiver, manifest: Manifest) -> None:
        tied = self._source.tied
        tensors = with_tied(_checked(self._source(), manifest), tied)
        table = watch_loading(receiver.reload, tensors, tied)
        if lost := table.incomplete(manifest):
            raise not_there(lost, "the engine's loaders did not take it whole")


def with_tied(tensors: Tensors, tied: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Tied tensors under their second name too: a receiver that packs its head does not see that the embedding is its own."""
    aliases = {name: alias for alias, name in tied.items()}
    held: list[tuple[str, Tensor]] = []
    for name, tensor in tensors:
        if name in aliases:
            held.append((aliases[name], tensor))
        yield name, tensor
    yield from held


def _checked(tensors: Tensors, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """The tensors, each of them as agreed, and all there at the end."""
    seen: set[str] = set()
    for name, tensor in tensors:
        manifest.require(name, tensor)
        seen.add(name)
        yield name, tensor
    manifest.require_all(seen)


def _buckets(tensors: Tensors) -> Iterator[list[tuple[str, Tensor]]]:
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        bucket.append((name, tensor))
        size += tensor.nbytes
        if size >= _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def not_there(names: Sequence[str], why: str) -> RunFault:
    """What stops a run whose weights did not arrive.

    Args:
        names: of the tensors, at least one.
        why: how that is known.
    """
    others = f" and {len(names) - 1} others" if len(names) > 1 else ""
    return RunFault(
        f"weights did not reach the engine: {names[0]}{others}",
        where="weights",
        why=why,
        fix="use rollout.engine=torch for this model, which shares the trainer's weights",
    )
