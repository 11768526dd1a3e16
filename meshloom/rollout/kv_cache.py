"""The key-value cache of the embedded engine: dense slots in banks of doubling capacity.

Owns: the memory of keys and values, which sequence is in which slot, what is kept outside of slots, and the bound on bytes.
Refuses to know: requests, sampling, models. Always holds: the bytes alive never exceed the budget, not even while a bank grows
(it is rebuilt a tensor at a time); the slots in use are the first ones of their bank, so attention reads plain views; a
sequence that outgrows its bank moves to the next, so at most about half of a slot is unused and sequences of alike length are
together; what is kept makes room for slots.

Legend: S slots, K key-value heads, C capacity in tokens, D width of a head.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from meshloom.plan.layer_kinds import latent_refusal
from meshloom.rollout.prefix_tree import Found, PrefixTree

SMALLEST_CAPACITY = 64
BLOCK_TOKENS = 64
"""Of what is kept outside of slots."""
_FEWEST_SLOTS = 8


def quarter_of_free_bytes(device: torch.device) -> int:
    """A quarter of the memory that is free now on a device."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return free // 4


@dataclass(frozen=True)
class CacheShape:
    """What one token takes: ``2 × layers × kv_heads × head_dim`` numbers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, model: PreTrainedModel, ranks: int = 1) -> "CacheShape":
        """Of a model that so many ranks hold together: each caches its own heads, at least one.

        Raises:
            UserError: if its keys and values come from a latent vector, as DeepSeek-V2's do (arXiv:2405.04434).
        """
        config = model.config.get_text_config()
        if getattr(config, "kv_lora_rank", None) is not None:
            raise latent_refusal()
        heads = config.num_attention_heads
        weight = model.get_input_embeddings().weight
        return cls(
            num_layers=config.num_hidden_layers,
            num_kv_heads=max(1, (getattr(config, "num_key_value_heads", None) or heads) // ranks),
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=weight.dtype,
            device=weight.device,
        )

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def empty(self, slots: int, capacity: int) -> Tensor:
        """Keys or values of one layer, uninitialised, [S, K, C, D]."""
        return torch.empty(slots, self.num_kv_heads, capacity, self.head_dim, dtype=self.dtype, device=self.device)


class Bank:
    """Slots of one capacity. ``owners[i]`` is the sequence in slot i, ``lengths[i]`` the tokens it has there.

    ``tensors`` holds the keys of each layer and then the values of each layer, [S, K, C, D].
    """

    def __init__(self, shape: CacheShape, capacity: int) -> None:
        self.shape, self.capacity, self.slots = shape, capacity, 0
        self.owners: list[Any] = []
        self.lengths = np.zeros(0, dtype=np.int64)
        self.tensors = [shape.empty(0, capacity) for _ in range(2 * shape.num_layers)]

    @property
    def allocated_tokens(self) -> int:
        return self.slots * self.capacity

    def keys(self, layer: int) -> Tensor:
        return self.tensors[layer]

    def values(self, layer: int) -> Tensor:
        return self.tensors[self.shape.num_layers + layer]

    def resize(self, slots: int) -> None:
        """Change the number of slots to ``slots`` ≥ those in use, a tensor at a time."""
        self._rebuild(self, slots, len(self.owners))

    def take_over(self, source: "Bank") -> None:
        """Move all sequences of a smaller bank into this unused one, a tensor at a time."""
        self._rebuild(source, len(source.owners), len(source.owners))
        self.owners, source.owners = source.owners, []
        source.resize(0)

    def _rebuild(self, source: "Bank", slots: int, used: int) -> None:
        """New tensors with the first ``used`` sequences of ``source``. The rest is zero: what a mask hides must be finite."""
        lengths = np.zeros(slots, dtype=np.int64)
        lengths[:used] = source.lengths[:used]
        longest = int(lengths.max(initial=0))
        for place in range(len(self.tensors)):
            new = self.shape.empty(slots, self.capacity)
            new[:used, :, :longest] = source.tensors[place][:used, :, :longest]
            new[:used, :, longest:] = 0
            new[used:] = 0
            source.tensors[place] = self.shape.empty(0, source.capacity)
            self.tensors[place] = new
        self.lengths, self.slots = lengths, slots

    def copy_from(self, source: "Bank", source_slots: Sequence[int], slots: Sequence[int]) -> None:
        """Copy tokens of slots in ``source`` (this bank or another) into slots here."""
        index = torch.tensor([*source_slots, *slots], device=self.shape.device).split([len(source_slots), len(slots)])
        self.lengths[list(slots)] = source.lengths[list(source_slots)]
        longest = int(self.lengths[list(slots)].max())
        for mine, theirs in zip(self.tensors, source.tensors, strict=True):
            mine[index[1], :, :longest] = theirs[index[0], :, :longest]

    def remove(self, holes: Sequence[int]) -> None:
        """Free slots; the last sequences move into the holes."""
        gone = set(holes)
        kept = len(self.owners) - len(gone)
        movers = [slot for slot in range(kept, len(self.owners)) if slot not in gone]
        targets = [slot for slot in sorted(gone) if slot < kept]
        if movers:
            self.copy_from(self, movers, targets)
        for mover, target in zip(movers, targets, strict=True):
            self.owners[target] = self.owners[mover]
        del self.owners[kept:]


@dataclass(frozen=True)
class Span:
    """Neighbouring slots ``start`` to ``stop`` − 1 of a bank."""

    bank: Bank
    start: int
    stop: int


class KVCache:
    """Banks of capacity 64, 128, … up to the longest sequence that is expected, within a budget of bytes.

    Args:
        shape: what one token takes.
        budget_bytes: hard bound on the bytes of all keys and values.
        longest: tokens of the longest sequence that can come.
        max_sequences: most sequences at once.
    """

    def __init__(self, shape: CacheShape, *, budget_bytes: int, longest: int, max_sequences: int) -> None:
        self.shape, self._max_sequences = shape, max_sequences
        self.budget_tokens = budget_bytes / shape.bytes_per_token
        self.banks = [Bank(shape, capacity) for capacity in _capacities(longest)]
        self.parked: list[Bank] = []
        self.kept: PrefixTree[Tensor] = PrefixTree(BLOCK_TOKENS)
        """Blocks [2 × layers, K, tokens, D], keys of each layer and then values."""

    @property
    def allocated_tokens(self) -> int:
        return sum(bank.allocated_tokens for bank in (*self.banks, *self.parked)) + self.kept.num_tokens

    @property
    def num_sequences(self) -> int:
        return sum(len(bank.owners) for bank in self.banks)

    @property
    def owners(self) -> list[Any]:
        return [owner for bank in self.banks for owner in bank.owners]

    def place(self, owners: Sequence[Any], length: int) -> Span | None:
        """Give each owner a slot for ``length`` tokens that the caller is about to write; none if memory is short."""
        bank = next(bank for bank in self.banks if bank.capacity >= length)
        start, stop = len(bank.owners), len(bank.owners) + len(owners)
        if not self._ensure(bank, stop):
            return None
        bank.owners.extend(owners)
        bank.lengths[start:stop] = length
        return Span(bank, start, stop)

    def promote(self) -> bool:
        """Move sequences whose slot is full to the next bank. False if memory is short; what was moved stays moved."""
        for small, large in reversed(list(pairwise(self.banks))):
            used = len(small.owners)
            full = np.flatnonzero(small.lengths[:used] == small.capacity).tolist()
            if not full:
                continue
            everything = len(full) == used and not large.owners
            if not (self._take_over(small, large) if everything else self._move(small, large, full)):
                return False
        return True

    def sweep(self, is_done: Callable[[Any], bool]) -> None:
        """Free the slots of the owners for which ``is_done`` holds."""
        for bank in self.banks:
            holes = [slot for slot, owner in enumerate(bank.owners) if is_done(owner)]
            if holes:
                bank.remove(holes)
                self._free_if_unused(bank)

    def keep(self, ids: Sequence[int], bank: Bank, slot: int) -> None:
        """Keep the keys and values of a slot's first tokens, as far as memory allows; what was used longest ago makes room."""

        def copy(start: int, stop: int) -> Tensor | None:
            if not self._evict(None, stop - start):
                return None
            block = self.shape.empty(len(bank.tensors), stop - start)
            return torch.stack([tensor[slot, :, start:stop] for tensor in bank.tensors], out=block)

        self.kept.unpin(self.kept.insert(ids, copy))

    def fill(self, span: Span, found: Found[Tensor]) -> None:
        """Copy what was found into slots."""
        blocks, count = [node.block for node in found.pinned], found.num_tokens
        for place, tensor in enumerate(span.bank.tensors if blocks else ()):
            tensor[span.start : span.stop, :, :count] = torch.cat([block[place] for block in blocks], 1)[:, :count]

    def park(self, length: int) -> Bank | None:
        """One slot outside the banks, for a prompt that later samples will copy; none if memory is short."""
        if not self._room(None, length):
            return None
        bank = Bank(self.shape, length)
        bank.resize(1)
        bank.lengths[0] = length
        self.parked.append(bank)
        return bank

    def unpark(self, bank: Bank) -> None:
        self.parked.remove(bank)

    def _missing(self, bank: Bank | None, new_tokens: int) -> float:
        """Tokens that memory lacks for a bank to be rebuilt with so many, or for so many beside all banks."""
        own = 0 if bank is None else bank.allocated_tokens
        return self.allocated_tokens - own + _rebuild_peak(self.shape, own, new_tokens) - self.budget_tokens

    def _room(self, bank: Bank | None, new_tokens: int) -> bool:
        """Whether there is memory, once what is kept has made room, and slots that are not in use if that is too little."""
        if self._missing(bank, new_tokens) > self.kept.num_idle_tokens:
            self._trim()
        return self._evict(bank, new_tokens)

    def _evict(self, bank: Bank | None, new_tokens: int) -> bool:
        """Whether there is memory, once what is kept has made room."""
        if self._missing(bank, new_tokens) > self.kept.num_idle_tokens:
            return False
        while self._missing(bank, new_tokens) > 0:
            self.kept.evict()
        return True

    def _ensure(self, bank: Bank, slots: int) -> bool:
        """Make a bank have ``slots`` slots: twice as many while memory is plenty, else exactly those needed."""
        if slots <= bank.slots:
            return True
        generous = max(slots, min(max(2 * slots, _FEWEST_SLOTS), self._max_sequences))
        rest = self.allocated_tokens - self.kept.num_tokens - bank.allocated_tokens
        if rest + generous * bank.capacity <= self.budget_tokens / 2:
            slots = generous
        if not self._room(bank, slots * bank.capacity):
            return False
        bank.resize(slots)
        return True

    def _take_over(self, small: Bank, large: Bank) -> bool:
        if not self._room(small, len(small.owners) * large.capacity):
            return False
        large.take_over(small)
        return True

    def _move(self, small: Bank, large: Bank, full: list[int]) -> bool:
        start, stop = len(large.owners), len(large.owners) + len(full)
        if not self._ensure(large, stop):
            return False
        large.owners.extend(small.owners[slot] for slot in full)
        large.copy_from(small, full, range(start, stop))
        small.remove(full)
        self._free_if_unused(small)
        return True

    def _free_if_unused(self, bank: Bank) -> None:
        if not bank.owners and bank.slots:
            bank.resize(0)

    def _trim(self) -> None:
        """Give back slots that are not in use, where there is room to rebuild the bank."""
        for bank in self.banks:
            used = len(bank.owners)
            if used < bank.slots and self._missing(bank, used * bank.capacity) <= 0:
                bank.resize(used)


def _capacities(longest: int) -> list[int]:
    """64, 128, … and ``longest`` itself as the last."""
    capacities = []
    capacity = SMALLEST_CAPACITY
    while capacity < longest:
        capacities.append(capacity)
        capacity *= 2
    return [*capacities, longest]


def _rebuild_peak(shape: CacheShape, old_tokens: int, new_tokens: int) -> float:
    """Most tokens' worth of memory alive while tensors of ``old_tokens`` are replaced one by one."""
    tensors = 2 * shape.num_layers
    return max(old_tokens + new_tokens / tensors, new_tokens + old_tokens / tensors)


def single_sequence_bytes(shape: CacheShape, length: int) -> int:
    """What a sequence of ``length`` tokens takes when it is alone, the move from its last bank but one included."""
    small, large = [0, *_capacities(length)][-2:]
    return math.ceil(_rebuild_peak(shape, small, large) * shape.bytes_per_token)
