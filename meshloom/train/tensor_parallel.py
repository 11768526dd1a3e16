"""Tensor parallelism: layers cut over ranks, by the plan that each family has in transformers.

Owns: what each word of a plan means for a module, which parameters are cut where. Refuses to know: losses, sharding over other
axes. Always holds: the model stays the plain one, whose modules compute with their part of a weight; what a plan does not
cut is whole on each rank and computed the same there; a plan that attaches to no layer, or a word that is unknown, is an
error.

Columns of queries, keys, values and of the first matrices of an MLP are cut, and rows of what comes after: one sum of all
ranks' results after attention and one after the MLP. Between them tokens do not need each other, and each rank has a piece of
them (Korthikanti et al. 2022, arXiv:2205.05198): a sum leaves it its piece, and pieces are gathered before the next cut
matrix. Of an adapter ``B · A`` on a cut matrix the factor beside the cut is cut with it: rows of ``B`` where columns are,
columns of ``A`` where rows are, and the sum is one of both. So what is outside of cut matrices sees some of the tokens, or, as
norms of single heads, some of the heads: gradients of its weights are parts of a sum. Embedding and head are cut by the
vocabulary where it divides evenly.
"""

import copy
import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from meshloom.config.errors import UserError
from meshloom.train.exchange import add_up_own, gather, own
from meshloom.train.head import decoder_of
from meshloom.train.load_sharded import parameter_owners
from meshloom.train.mesh import TrainMesh
from meshloom.train.value_head import head_of, is_critic
from meshloom.train.vocabulary import VocabularyPart

COLUMNS, ROWS, HEAD_NORM = "colwise", "rowwise", "replicated_with_grad_allreduce"


@dataclass
class TensorCut:
    """How a model was cut.

    Args:
        whole: parameters that every rank has a copy of, and whether each one's gradient is a part of a sum; tables see all
            tokens.
        vocabulary: this rank's part of it; none where tables are whole.
        cut: how many modules were cut.
    """

    whole: dict[str, bool] = field(default_factory=dict)
    vocabulary: VocabularyPart | None = None
    cut: int = 0


def cut_layers(model: PreTrainedModel, mesh: TrainMesh, *, within: nn.Module | None = None) -> TensorCut:
    """Cut a model's layers over the axis ``tp``, in place, and adapters that are on them.

    Args:
        model: with weights, or with parameters that have no memory.
        mesh: with an axis ``tp``.
        within: the wrapper that the model is in, whose names for parameters are used; default: it is in none.

    Raises:
        UserError: if the family has no plan, the plan fits no layer, or it cannot be followed.
    """
    decoder = decoder_of(model)
    cutter = _Cutter(model, mesh)
    for name, module, word in planned_modules(model):
        cutter.follow(decoder.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], module, word)
    if not cutter.found.cut:
        plan = decoder.config.get_text_config().base_model_tp_plan
        raise UserError(
            f"tensor parallelism attaches to no layer of {type(model).__name__}",
            where="parallel.actor.tensor",
            why="transformers has no plan for this family" if not plan else "its plan names no module of this model",
            fix="parallel.actor.tensor=1",
        )
    cutter.cut_vocabulary()
    cutter.note_whole(within or model)
    return cutter.found


def planned_modules(model: PreTrainedModel) -> list[tuple[str, nn.Module, str]]:
    """Modules of a model's decoder that its family's plan names, and what the plan says of each; no embeddings, which are cut
    with the head whatever a plan says (that of tied ones is in it in transformers 5.17, no more in 5.24)."""
    decoder = decoder_of(model)
    plan = decoder.config.get_text_config().base_model_tp_plan or {}
    words = ((name, module, plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))) for name, module in decoder.named_modules())
    return [found for found in words if found[2] is not None and not isinstance(found[1], nn.Embedding)]


class _Cutter:
    """Cuts modules of one model."""

    def __init__(self, model: PreTrainedModel, mesh: TrainMesh) -> None:
        self.model, self.mesh, self.found = model, mesh, TensorCut()
        self.ranks, self.rank, self.group = mesh.size("tp"), mesh.place["tp"], mesh.groups.tp
        config = model.config.get_text_config()
        self.key_value_heads = config.num_key_value_heads
        self._owners = parameter_owners(model)
        self._entered: set[nn.Module] = set()
        self._tables: set[int] = set()

    def follow(self, parent: nn.Module, name: str, module: nn.Module, word: str) -> None:
        """Do what the plan says of a module.

        Raises:
            UserError: if it is not known how.
        """
        if word == HEAD_NORM:
            return
        layer, down, up = _with_adapter(module)
        if word == COLUMNS and isinstance(layer, nn.Linear):
            self._cut_columns(parent, name, [layer] if up is None else [layer, up])
        elif word == ROWS and isinstance(layer, nn.Linear):
            self._cut(layer, "weight", 1)
            module.forward = partial(_rows_forward, module, layer, self.group)
            if down is not None:
                self._cut(down, "weight", 1)
                for cut in (layer, down):
                    cut.forward = partial(_products_forward, cut)
            self.found.cut += 1
        else:
            raise UserError(
                f"the plan of {type(self.model).__name__} cuts {name} in a way that is not known here: {word}",
                where="parallel.actor.tensor",
                fix="parallel.actor.tensor=1",
            )

    def _cut_columns(self, parent: nn.Module, name: str, modules: list[nn.Linear]) -> None:
        """Cut a layer, and the last factor of its adapter."""
        self._enter(parent)
        self.found.cut += 1
        for module in modules:
            if name in ("k_proj", "v_proj") and self.key_value_heads % self.ranks:
                # Fewer heads than ranks: the matrix stays whole, and each rank computes the one head that its queries need.
                width = module.out_features // self.key_value_heads
                head = self.rank * self.key_value_heads // self.ranks
                module.forward = partial(_some_columns_forward, module, slice(head * width, (head + 1) * width))
                continue
            for leaf in ("weight", "bias"):
                if getattr(module, leaf) is not None:
                    self._cut(module, leaf, 0)
            module.forward = partial(_columns_forward, module)

    def _enter(self, parent: nn.Module) -> None:
        """What a parent is given goes to all of its cut columns: one exchange of gradients for them together."""
        if parent in self._entered:
            return
        self._entered.add(parent)
        parent.register_forward_pre_hook(partial(_entered, self.group), with_kwargs=True)

    def cut_vocabulary(self) -> None:
        """Cut embedding and head, if the vocabulary divides evenly."""
        table, head = self.model.get_input_embeddings(), head_of(self.model)
        if is_critic(self.model):  # each rank has the whole of a scalar head, which sees all tokens
            self._tables = {id(parameter) for parameter in head.parameters()}
            head = None
        # A stage of a pipeline may have either, or none.
        tables = [module for module in (table, head) if isinstance(module, nn.Embedding | nn.Linear)]
        for module in (table, head):
            if hasattr(module, "base_layer"):
                raise UserError(
                    "an adapter on the embedding or the head cannot be cut by the vocabulary",
                    where="model.lora.target_modules",
                    fix="all-linear, or parallel.actor.tensor=1",
                )
        rows = {len(module.weight) for module in tables}
        if len(rows) != 1 or (size := rows.pop()) % self.ranks:
            if table in tables:
                table.forward = partial(_whole_embedding_forward, table, self.group)
            self._tables |= {id(parameter) for module in tables for parameter in module.parameters()}
            return
        each = size // self.ranks
        part = VocabularyPart(self.rank * each, each, self.group)
        for module in tables:
            for leaf, parameter in module.named_parameters(recurse=False):
                if not isinstance(parameter, DTensor):  # a table that is both is cut once
                    self._cut(module, leaf, 0)
        if table in tables:
            table.forward = partial(_embedding_forward, table, part)
        if head in tables:
            head.forward = partial(_refused, head)
        self.found.vocabulary = part

    def note_whole(self, named: nn.Module) -> None:
        """Note what stays whole, by the names that a module has for it."""
        for name, parameter in named.named_parameters():
            if not isinstance(parameter, DTensor):
                self.found.whole[name] = id(parameter) not in self._tables

    @torch.no_grad()
    def _cut(self, module: nn.Module, leaf: str, dim: int) -> None:
        """Leave a module this rank's part of a parameter; modules that share it share the part."""
        parameter = getattr(module, leaf)
        if parameter.shape[dim] % self.ranks:
            raise UserError(
                f"{leaf} {tuple(parameter.shape)} of a layer is not divisible by tp {self.ranks}",
                where="parallel.actor.tensor",
                fix="parallel.actor.tensor=1",
            )
        each = parameter.shape[dim] // self.ranks
        # A copy, so that the whole is freed; without memory it has none either.
        held = parameter.detach().narrow(dim, self.rank * each, each).clone(memory_format=torch.contiguous_format)
        whole = DTensor.from_local(
            held, self.mesh.tensor_mesh, [Shard(dim)], run_check=False, shape=parameter.shape,
            stride=parameter.stride(),
        )  # fmt: skip
        cut = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        for owner, name in self._owners[id(parameter)]:
            setattr(owner, name, cut)


@overload
def local(parameter: Tensor) -> Tensor: ...


@overload
def local(parameter: None) -> None: ...


def local(parameter: Tensor | None) -> Tensor | None:
    """The part of a parameter that this rank computes with."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _entered(group: Any, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    if args:
        return (gather(args[0], group, 1), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": gather(kwargs["hidden_states"], group, 1)}


def _with_adapter(module: nn.Module) -> tuple[nn.Module, nn.Module | None, nn.Module | None]:
    """A layer itself, and the two factors of its adapter, if it has one."""
    if not hasattr(module, "base_layer"):
        return module, None, None
    return module.base_layer, module.lora_A["default"], module.lora_B["default"]


def _products_forward(module: nn.Linear, x: Tensor) -> Tensor:
    """This rank's part of a sum, without the bias."""
    return nn.functional.linear(x, local(module.weight))


def _columns_forward(module: nn.Linear, x: Tensor) -> Tensor:
    return nn.functional.linear(x, local(module.weight), local(module.bias))


def _some_columns_forward(module: nn.Linear, columns: slice, x: Tensor) -> Tensor:
    bias = None if module.bias is None else module.bias[columns]
    return nn.functional.linear(x, module.weight[columns], bias)


def _rows_forward(module: nn.Module, layer: nn.Linear, group: Any, x: Tensor) -> Tensor:
    """Of a layer, or of one in its adapter."""
    parts = _products_forward(layer, x) if module is layer else type(module).forward(module, x)
    total = add_up_own(parts, group, 1)
    return total if layer.bias is None else total + layer.bias


def _embedding_forward(table: nn.Embedding, part: VocabularyPart, ids: Tensor) -> Tensor:
    """The table's own forward, which a family may have changed, on its part of the rows."""
    cut = copy.copy(table)
    cut.__dict__["_parameters"] = {"weight": local(table.weight)}
    # Its row gets no gradient: it must be the same token's row here.
    pad = table.padding_idx
    cut.padding_idx = pad - part.first if pad is not None and 0 <= pad - part.first < part.size else None
    return part.embed(ids, partial(type(table).forward, cut))


def _whole_embedding_forward(table: nn.Embedding, group: Any, ids: Tensor) -> Tensor:
    return own(type(table).forward(table, ids), group, 1)


def _refused(head: nn.Module, *_: Any) -> Tensor:
    raise RuntimeError("the logits of a cut vocabulary are never whole")
