"""A model cut over the devices of an engine: each has some heads, some columns of the MLP, some of the vocabulary.

Owns: which part of which parameter a device has. Refuses to know: how weights get there, how tokens are drawn. Always holds:
the parameters are plain tensors, each one box of the whole; the cut is the family's own plan in transformers; heads of keys
and values that are fewer than devices are on several, a head on each; tables whose rows do not divide are whole on each.

Two sums of all devices' results in each layer, one after attention and one after the MLP: between them, each device computes
the same on all tokens. A decode step has a few tokens, so, unlike in training, nothing is gained by dividing them.
"""

import copy
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from meshloom.config.errors import UserError
from meshloom.rollout.peers import OverRanks, Peers
from meshloom.train.load_sharded import parameter_owners
from meshloom.train.tensor_parallel import COLUMNS, HEAD_NORM, ROWS, planned_modules
from meshloom.weights.layouts import Box

Held = Mapping[str, tuple[tuple[int, ...], Box]]
"""Of parameters that are a part, by name: the shape of the whole and the box."""

_WHERE, _FIX = "parallel.rollout.tensor", "parallel.rollout.tensor=1"


def cut_for_engine(model: PreTrainedModel, peers: OverRanks) -> Held:
    """Cut a model in place.

    Args:
        model: with weights, or with parameters that have no memory.
        peers: who share it; they are told whether the vocabulary is cut.

    Raises:
        UserError: if the family has no plan, it cannot be followed, or sizes do not divide.
    """
    cutter = _Cutter(model, peers)
    for name, module, word in planned_modules(model):
        cutter.follow(name, module, word)
    if not cutter.held:
        raise UserError(
            f"an engine's tensor parallelism attaches to no layer of {type(model).__name__}",
            where=_WHERE,
            why="transformers has no plan for this family, or one that names no module of this model",
            fix=_FIX,
        )
    cutter.cut_tables()
    return cutter.held


class _Cutter:
    def __init__(self, model: PreTrainedModel, peers: OverRanks) -> None:
        self.held: dict[str, tuple[tuple[int, ...], Box]] = {}
        self._model, self._peers = model, peers
        self._owners = parameter_owners(model)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        config = model.config.get_text_config()
        self._heads, self._key_value_heads = config.num_attention_heads, config.num_key_value_heads
        if self._heads % peers.count or (self._key_value_heads % peers.count and peers.count % self._key_value_heads):
            raise UserError(
                f"{self._heads} heads, {self._key_value_heads} of keys and values, do not go into {peers.count} devices",
                where=_WHERE,
                why="each device has some heads of a layer",
                fix="a number that divides both, or is a multiple of the heads of keys",
            )

    def follow(self, name: str, module: nn.Module, word: str) -> None:
        """Do what the plan says of a module."""
        if word == HEAD_NORM:
            return
        if not isinstance(module, nn.Linear) or word not in (COLUMNS, ROWS):
            raise UserError(
                f"the plan of {type(self._model).__name__} cuts {name} in a way that is not known here: {word}",
                where=_WHERE,
                fix=_FIX,
            )
        if word == ROWS:
            self._cut(module, "weight", 1, self._peers.count, self._peers.rank)
            module.in_features = module.weight.shape[1]
            module.forward = partial(rows_forward, module, self._peers)
            return
        parts, part = self._peers.count, self._peers.rank
        if name.rpartition(".")[2] in ("k_proj", "v_proj") and self._key_value_heads % parts:
            part = part * self._key_value_heads // parts
            parts = self._key_value_heads
        for leaf, _ in list(module.named_parameters(recurse=False)):
            self._cut(module, leaf, 0, parts, part)
        module.out_features = module.weight.shape[0]

    def cut_tables(self) -> None:
        """Cut embedding and head, if the vocabulary divides evenly."""
        peers, table, head = self._peers, self._model.get_input_embeddings(), self._model.get_output_embeddings()
        rows = len(table.weight)
        if len(head.weight) != rows or rows % peers.count:
            return
        peers.cut_vocabulary(rows)
        tied = head.weight is table.weight
        self._cut(table, "weight", 0, peers.count, peers.rank)
        for leaf, _ in list(head.named_parameters(recurse=False)):
            if not (tied and leaf == "weight"):
                self._cut(head, leaf, 0, peers.count, peers.rank)
        table.forward = partial(_embedding_forward, table, peers)

    @torch.no_grad()
    def _cut(self, module: nn.Module, leaf: str, dim: int, parts: int, part: int) -> None:
        """Leave a module one of ``parts`` parts of a parameter; modules that share it share the part."""
        whole = getattr(module, leaf)
        if whole.shape[dim] % parts:
            what = f"{self._names[id(whole)]} {list(whole.shape)} is not divisible by tp {parts}"
            raise UserError(what, where=_WHERE, fix=_FIX)
        box = Box.whole(whole.shape).part(dim, part, parts)
        # A copy, so that the whole is freed; without memory it has none either.
        own = box.of(whole.detach(), Box.whole(whole.shape)).clone(memory_format=torch.contiguous_format)
        parameter = nn.Parameter(own, requires_grad=whole.requires_grad)
        self.held[self._names[id(whole)]] = tuple(whole.shape), box
        for owner, name in self._owners[id(whole)]:
            setattr(owner, name, parameter)


def rows_forward(module: nn.Linear, peers: Peers, x: Tensor) -> Tensor:
    """A layer that is cut by its columns' inputs: the sum of all devices' products, and the bias once."""
    total = peers.add_up(linear(x, module.weight))
    return total if module.bias is None else total + module.bias


def _embedding_forward(table: nn.Embedding, peers: OverRanks, ids: Tensor) -> Tensor:
    """The table's own forward, which a family may have changed, on rows that all devices have put together."""
    rows = peers.embed(ids, table.weight)
    shown = copy.copy(table)
    shown.__dict__["_parameters"] = {"weight": rows.flatten(0, -2)}
    shown.padding_idx = None
    places = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
    return type(table).forward(shown, places)


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Give parameters without memory some on a device, whose values are yet to come; everything else moves there."""
    owners = parameter_owners(model)
    for parameter in list(model.parameters()):
        if parameter.is_meta:
            filled = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
            for owner, leaf in owners[id(parameter)]:
                setattr(owner, leaf, filled)
    model.to(device)
