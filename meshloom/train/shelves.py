"""Where bytes are while their device does not hold them: the host's memory, or files.

Owns: copying storages out and in, and the memory and files they are copied to. Refuses to know: models, phases, what the bytes
mean. Always holds: what is brought back is bit for bit what was put away; host memory is allocated once and used again; a file
that is shorter than what was written, or a disk that is full, is an error that names it.

A storage that was put away stays the same object, with no bytes: every tensor on it, tied weights and views among them, has
its values again once the bytes are back. On a GPU copies run on a stream of their own and, to the host, between pinned memory
and the device; nothing waits for them but the arrivals that are asked for.
"""

import ctypes
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage

from meshloom.config.errors import RunFault
from meshloom.plan.residency import Residency

_SLAB_BYTES = 1 << 28
"""Of pinned memory taken at once; a power of two, as what torch pins is rounded up to one."""
_STAGING_BYTES = 1 << 26
_ALIGNMENT = 512

Groups = Sequence[Sequence[UntypedStorage]]
"""Storages of one device, in the order in which they are needed; those of a group together."""


class Arrival:
    """Groups of storages on their way to the device.

    Args:
        device: where to.
        events: of each group; empty where they have arrived.
        copying: what still issues copies in the background, if anything does.
    """

    def __init__(
        self, device: torch.device, events: Sequence[torch.cuda.Event] = (), copying: Future[None] | None = None
    ) -> None:
        self._device, self._events, self._copying = device, list(events), copying
        self._waited = -1

    def wait(self, group: int | None = None) -> None:
        """Let what is computed from now on see the groups up to ``group``, all of them by default. The processor waits only
        where a file is read.

        Raises:
            RunFault: if the bytes could not be read.
        """
        if self._copying is not None:
            copying, self._copying = self._copying, None
            copying.result()
        last = len(self._events) - 1 if group is None else group
        for place in range(self._waited + 1, min(last, len(self._events) - 1) + 1):
            torch.cuda.current_stream(self._device).wait_event(self._events[place])
        self._waited = max(self._waited, last)


class Shelf(Protocol):
    """Holds the bytes of storages that are away."""

    at: Residency

    def put(self, groups: Groups) -> None:
        """Copy out and leave each storage without bytes."""
        ...

    def take(self, groups: Groups) -> Arrival:
        """Give the storages that were put, in the same groups, their bytes back. What was put stays here until the next
        ``put``."""
        ...

    def settle(self) -> None:
        """Wait until what was put is here and its memory on the device is free."""
        ...

    def close(self) -> None:
        """Give up memory and files."""
        ...


@dataclass(frozen=True)
class Stretch:
    """A part of a storage.

    Args:
        group, index: which storage.
        start, stop: bytes of it.
        place: byte of the shelf that the first of them is at.
    """

    group: int
    index: int
    start: int
    stop: int
    place: int


def stretches(sizes: Sequence[Sequence[int]], longest: int) -> Iterator[Stretch]:
    """Storages one after the other on a shelf whose pieces of ``longest`` bytes no stretch crosses.

    Args:
        sizes: bytes of each storage, by groups.
        longest: a multiple of the alignment.
    """
    place = 0
    for group, of_group in enumerate(sizes):
        for index, size in enumerate(of_group):
            start = 0
            while start < size:
                count = min(size - start, longest - place % longest)
                yield Stretch(group, index, start, start + count, place)
                start, place = start + count, place + count
            place = -(-place // _ALIGNMENT) * _ALIGNMENT


def sizes_of(groups: Groups) -> list[list[int]]:
    """Bytes of each storage."""
    return [[storage.nbytes() for storage in group] for group in groups]


def raw(storage: UntypedStorage) -> Tensor:
    """The bytes of a storage, uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class HostShelf:
    """In the host's memory; pinned where the device is a GPU.

    Args:
        device: whose storages come here.
        slab_bytes: memory that is taken at once; a power of two.
    """

    at = Residency.HOST

    def __init__(self, device: torch.device, slab_bytes: int = _SLAB_BYTES) -> None:
        self._device, self._gpu, self._slab_bytes = device, device.type == "cuda", slab_bytes
        self._slabs: list[Tensor] = []
        self._sizes: list[list[int]] = []
        self._stream = torch.cuda.Stream(device) if self._gpu else None

    @property
    def held_bytes(self) -> int:
        """Of host memory."""
        return sum(slab.nbytes for slab in self._slabs)

    @torch.no_grad()
    def put(self, groups: Groups) -> None:
        self._sizes = sizes_of(groups)
        plan = list(stretches(self._sizes, self._slab_bytes))
        self._reserve(max((part.place + part.stop - part.start for part in plan), default=0))
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self._on_stream():
            for part in plan:
                source = raw(groups[part.group][part.index])
                self._here(part).copy_(source[part.start : part.stop], non_blocking=True)
                if self._stream is not None:
                    # The allocator gives the memory to nobody else before the copy has read it.
                    source.record_stream(self._stream)
        empty(groups)

    @torch.no_grad()
    def take(self, groups: Groups) -> Arrival:
        fill(groups, self._sizes)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        plan, events = list(stretches(self._sizes, self._slab_bytes)), []
        with self._on_stream():
            for number in range(len(groups)):
                for part in (part for part in plan if part.group == number):
                    target = raw(groups[part.group][part.index])
                    target[part.start : part.stop].copy_(self._here(part), non_blocking=True)
                if self._stream is not None:
                    events.append(self._stream.record_event())
        return Arrival(self._device, events)

    def settle(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        self.settle()
        self._slabs.clear()

    def _on_stream(self):
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def _here(self, part: Stretch) -> Tensor:
        begin = part.place % self._slab_bytes
        return self._slabs[part.place // self._slab_bytes][begin : begin + part.stop - part.start]

    def _reserve(self, total: int) -> None:
        """Have slabs for so many bytes. Only the processor's last one is smaller, and grows; nothing is kept in it then."""
        while total > sum(slab.nbytes for slab in self._slabs):
            if self._slabs and self._slabs[-1].nbytes < self._slab_bytes:
                self._slabs.pop()
            missing = total - sum(slab.nbytes for slab in self._slabs)
            size = self._slab_bytes if self._gpu else min(missing, self._slab_bytes)
            self._slabs.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._gpu))


class DiskShelf:
    """In one file, each storage at a range of its own.

    Args:
        device: whose storages come here.
        file: that is written; its folder is made.
        after: a shelf that has no copies under way while this one has, and whose thread and staging memory this one uses.
    """

    at = Residency.DISK

    def __init__(self, device: torch.device, file: Path, after: "DiskShelf | None" = None) -> None:
        self._device, self._file, self._gpu = device, file, device.type == "cuda"
        self._sizes: list[list[int]] = []
        self._handle: int | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="offload") if after is None else after._worker
        self._stream = torch.cuda.Stream(device) if self._gpu else None
        self._staging: list[Tensor] = [] if after is None else after._staging

    @torch.no_grad()
    def put(self, groups: Groups) -> None:
        self._sizes = sizes_of(groups)
        try:
            self._put(groups)
        except OSError as error:
            raise self._fault("could not be written", error) from error
        empty(groups)

    @torch.no_grad()
    def take(self, groups: Groups) -> Arrival:
        fill(groups, self._sizes)
        if self._stream is None:
            self._take(groups, [])
            return Arrival(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        events = [torch.cuda.Event() for _ in groups]
        return Arrival(self._device, events, self._worker.submit(self._take, groups, events))

    def settle(self) -> None:
        """Nothing: ``put`` waits."""

    def close(self) -> None:
        self._worker.shutdown()
        self._staging.clear()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        with suppress(FileNotFoundError):
            self._file.unlink()

    def _put(self, groups: Groups) -> None:
        handle, writing = self._open(), []
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for number, part in enumerate(stretches(self._sizes, _STAGING_BYTES)):
            source = raw(groups[part.group][part.index])[part.start : part.stop]
            if self._stream is None:
                _write(handle, source, part.place)
                continue
            if len(writing) > 1:
                writing[number - 2].result()  # its staging is used again
            here = self._stage(number)[: part.stop - part.start]
            with torch.cuda.stream(self._stream):
                here.copy_(source, non_blocking=True)
            done = self._stream.record_event()
            writing.append(self._worker.submit(_write_after, done, handle, here, part.place))
        for each in writing:
            each.result()

    @torch.no_grad()
    def _take(self, groups: Groups, events: Sequence[torch.cuda.Event]) -> None:
        try:
            handle, copied = self._open(), []
            current = 0
            for number, part in enumerate(stretches(self._sizes, _STAGING_BYTES)):
                target = raw(groups[part.group][part.index])[part.start : part.stop]
                if self._stream is None:
                    self._read(handle, target, part.place)
                    continue
                for group in range(current, part.group):
                    events[group].record(self._stream)
                current = part.group
                if len(copied) > 1:
                    copied[number - 2].synchronize()
                here = self._stage(number)[: part.stop - part.start]
                self._read(handle, here, part.place)
                with torch.cuda.stream(self._stream):
                    target.copy_(here, non_blocking=True)
                copied.append(self._stream.record_event())
            for event in events[current:]:
                event.record(self._stream)
        except OSError as error:
            raise self._fault("could not be read", error) from error

    def _open(self) -> int:
        if self._handle is None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        return self._handle

    def _stage(self, number: int) -> Tensor:
        while len(self._staging) < 2:
            self._staging.append(torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True))
        return self._staging[number % 2]

    def _read(self, handle: int, target: Tensor, place: int) -> None:
        view, done = _bytes_of(target), 0
        while done < len(view):
            count = os.preadv(handle, [view[done:]], place + done)
            if count == 0:
                why = f"it ends at byte {place + done}, more was written"
                raise RunFault("what was moved to disk is not there any more", where=str(self._file), why=why)
            done += count

    def _fault(self, what: str, error: OSError) -> RunFault:
        return RunFault(
            f"what is moved to disk {what}",
            where=str(self._file),
            why=error.strerror or str(error),
            fix="a folder with more room (offload.folder), or host in place of disk in the settings of offload.ROLE",
        )


def empty(groups: Groups) -> None:
    """Leave storages without bytes."""
    for group in groups:
        for storage in group:
            storage.resize_(0)


def fill(groups: Groups, sizes: Sequence[Sequence[int]]) -> None:
    """Give storages memory, not yet values."""
    for group, of_group in zip(groups, sizes, strict=True):
        for storage, size in zip(group, of_group, strict=True):
            storage.resize_(size)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of the processor. Going through numpy would fix its storage's size for good."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def own_storages(tensors: Iterable[Tensor]) -> None:
    """Give tensors whose storage cannot lose its bytes (read from files on a processor) one that can, shared as before."""
    fixed: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if not storage.resizable():
            fixed.setdefault(storage._cdata, []).append(tensor)
    for sharing in fixed.values():
        whole = sharing[0].untyped_storage().clone()
        for tensor in sharing:
            moved = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.data = moved.set_(whole, tensor.storage_offset(), tensor.shape, tensor.stride())


def _write_after(done: torch.cuda.Event, handle: int, source: Tensor, place: int) -> None:
    done.synchronize()
    _write(handle, source, place)


def _write(handle: int, source: Tensor, place: int) -> None:
    view, done = _bytes_of(source), 0
    while done < len(view):
        done += os.pwrite(handle, view[done:], place + done)
