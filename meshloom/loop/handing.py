"""Pieces of samples from rank to rank: the controller sends what several ranks lack to one of them.

Owns: how ranks hand pieces on. Refuses to know: what pieces are for, which ranks lack what (``loop.held``). Always holds: a
rank that hands on waits for nobody before it does, so no ranks wait for each other in a circle; what arrives is what was sent.

Tensors of the processor travel over the process group of all ranks, which has gloo for them.
"""

import json
from dataclasses import replace

import torch
import torch.distributed as dist

from meshloom.fabric.wire import decode, encode
from meshloom.loop.parcels import Parcel


def handed_on(parcel: Parcel) -> Parcel:
    """A parcel with its pieces: those that it came with, which go on to other ranks from here, or those of another rank."""
    if parcel.hand_to:
        message = _written(parcel)
        size = torch.tensor([len(message)])
        for work in [dist.isend(tensor, rank) for rank in parcel.hand_to for tensor in (size, message)]:
            work.wait()
    if parcel.comes_from is None:
        return parcel
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, parcel.comes_from)
    message = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(message, parcel.comes_from)
    return _read(parcel, message)


def _written(parcel: Parcel) -> torch.Tensor:
    """Pieces as bytes: the length of the header, the header, and the tensors end to end."""
    header, blobs = encode(parcel.pieces)
    views = [memoryview(blob).cast("B") for blob in blobs]
    text = json.dumps([header, [len(view) for view in views]]).encode()
    whole = bytearray(len(text).to_bytes(8, "little") + text)
    for view in views:
        whole += view
    return torch.frombuffer(whole, dtype=torch.uint8)


def _read(parcel: Parcel, message: torch.Tensor) -> Parcel:
    whole = memoryview(message.numpy())
    start = 8 + int.from_bytes(whole[:8], "little")
    header, sizes = json.loads(bytes(whole[8:start]))
    blobs = []
    for size in sizes:
        blobs.append(bytearray(whole[start : start + size]))  # of its own memory, where every dtype may begin
        start += size
    return replace(parcel, pieces=decode(header, blobs))
