"""A model that is cut over ranks, with the verbs of ``TrainedModel``; each rank calls them with its own samples.

Owns: how many microbatches ranks run together, passes of ranks that have none. Refuses to know: which algorithm calls it, how
samples were divided. Always holds: what ``meshloom.train.model`` says, whatever the mesh; a rank's bound holds for its own
microbatches; all ranks run equally many passes, so that every exchange between them is met.

Ranks of the same data place (``TrainMesh.data_place``) are called with the same samples, and return the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from meshloom.config.settings import ModelSettings, OptimizerSettings
from meshloom.samples import Samples, SampleTooLong, concat
from meshloom.train.attention import AttentionLayout, attends_in_graph
from meshloom.train.exchange import add_up, gather_same
from meshloom.train.gather import take_rows
from meshloom.train.head import OutputHead
from meshloom.train.mesh import TrainMesh
from meshloom.train.model import Loss, MicrobatchBound, TrainedModel
from meshloom.train.shard import Root, release
from meshloom.train.sharded_optimizer import ShardedOptimizer
from meshloom.train.sharing import Computed
from meshloom.train.tensor_parallel import TensorCut, local
from meshloom.train.ulysses import SplitAttention, TokenSplit
from meshloom.train.upload import upload_samples
from meshloom.train.value_head import ValueHead, is_critic


class MeshModel(TrainedModel):
    """One model over the ranks of a mesh. ``train.build_on_mesh`` makes it.

    Args:
        root: the sharded model.
        settings: as for one device.
        bound: size of a microbatch on a rank, and of what ranks with the same samples hold together.
        optimizer: none for a model that is only asked.
        mesh: over which it is cut.
        compute: dtype in which it computes.
        cut: what tensor parallelism made of it.
        tied: parameters that the first and the last stage of a pipeline both have.
    """

    def __init__(
        self,
        root: Root,
        settings: ModelSettings,
        bound: MicrobatchBound,
        optimizer: OptimizerSettings | None,
        mesh: TrainMesh,
        *,
        compute: torch.dtype,
        cut: TensorCut,
        tied: Sequence[str] = (),
    ) -> None:
        self.root, self.mesh, self.compute, self._cut, self._tied = root, mesh, compute, cut, tuple(tied)
        super().__init__(root.module, settings, bound, optimizer)
        self.device = mesh.device

    def forward(self, samples: Samples, *, temperature: float = 1.0, adapters: bool = True) -> tuple[Tensor, ...]:
        """See ``TrainedModel.forward``; due on all ranks at once, each with its own samples, or none."""
        self._set_mode(adapter_dropout=False)
        packed = self._pack_together(samples)
        with torch.no_grad(), self.layers.active(), nullcontext() if adapters else self.module.disable_adapter():
            columns = self._ask([samples.select(indices) if indices else None for indices in packed], temperature)
        release(self.root)
        parts = [
            Samples(samples.lengths[indices], dict(zip(self.head.columns, predicted, strict=True)))
            for indices, predicted in zip(packed, columns, strict=True)
            if indices
        ]
        if not parts:
            return tuple(torch.zeros(0) for _ in self.head.columns)
        together = concat(parts)
        # Only here does the processor wait for the device.
        together = together.with_tokens(**{name: column.cpu() for name, column in together.tokens.items()})
        together = together.select(torch.tensor([i for indices in packed for i in indices]).argsort())
        return tuple(together[name] for name in self.head.columns)

    def forward_backward(self, samples: Samples, loss: Loss, *, temperature: float = 1.0) -> dict[str, Any]:
        """See ``TrainedModel.forward_backward``; due on all ranks at once.

        The loss's denominators are those of all ranks' samples. What is returned is of this rank's samples; ranks of one data
        place return the same, so a caller adds up one of each. Without samples it is ``loss`` alone, 0.
        """
        self._set_mode(adapter_dropout=True)
        packed = self._pack_together(samples)
        with self.layers.active():
            reports = self._learn(
                [samples.select(indices) if indices else None for indices in packed], loss, temperature
            )
        release(self.root)
        if self.optimizer is not None and not self._gradients_checked:
            self.optimizer.collect()
            self._check_gradients()
        merged: dict[str, Any] = {}
        for report in reports:
            for name, value in report.items():
                merged[name] = merged[name] + value if name in merged else value
        return merged or {"loss": torch.zeros((), device=self.device)}

    def _ask(self, microbatches: list[Samples | None], temperature: float) -> list[tuple[Tensor, ...]]:
        """What the head says of each microbatch's tokens, [T]; of none, whatever."""
        return [self._predict(microbatch or NOTHING, temperature) for microbatch in microbatches]

    def _learn(self, microbatches: list[Samples | None], loss: Loss, temperature: float) -> list[dict[str, Any]]:
        """Add the gradients of microbatches; what the loss reported of those that there are."""
        reports = []
        for microbatch in microbatches:
            total, report = self._loss_of(microbatch, self._predict(microbatch or NOTHING, temperature), loss)
            total.backward()
            reports.append(report)
        return reports

    def _loss_of(
        self, microbatch: Samples | None, predicted: tuple[Tensor, ...], loss: Loss
    ) -> tuple[Tensor, dict[str, Any]]:
        """A microbatch's share of the loss, and its report. Without one, all gradients are 0, for no row has met the head; they
        are exchanged as those of other ranks."""
        if microbatch is None:
            return torch.stack(predicted).sum(), {}
        parts = loss(upload_samples(microbatch, self.device), *predicted)
        return parts.total, {"loss": parts.total.detach(), **parts.stats}

    def take_utilization(self, seconds: float) -> dict[str, float]:
        """See ``TrainedModel.take_utilization``: of this rank's device, which does a part of what its samples need."""
        parts = self.mesh.size("tp") * self.mesh.size("sp")
        found = {name: share / parts for name, share in super().take_utilization(seconds).items()}
        if "mfu_attention" in found:  # of all layers, of which a stage has some
            found["mfu_attention"] /= self.mesh.size("pp")
        return found

    def to(self, device: torch.device) -> None:
        """A model on a mesh stays where its ranks are."""
        raise NotImplementedError("a model on a mesh does not move by itself")

    def _pack_together(self, samples: Samples) -> list[list[int]]:
        """This rank's microbatches, and as many empty ones as other ranks have more.

        Raises:
            SampleTooLong: if one sample exceeds the bound alone.
            PeerFailed: if another rank could not pack its samples.
        """
        packed: list[list[int]] = []
        error: Exception | None = None
        try:
            packed = self._pack(samples) if len(samples) else []
        except (SampleTooLong, ValueError) as raised:
            error = raised
        count = self.mesh.agree(len(packed), error)
        return packed + [[] for _ in range(count - len(packed))]

    def _own_work(self, computed: Computed) -> dict[str, Tensor]:
        return self._split(computed).predictions(computed) if self.mesh.groups.sp is not None else {}

    def _compute(self, moved: Mapping[str, Tensor], computed: Computed, temperature: float) -> tuple[Tensor, ...]:
        own_Kn = self.root(lambda: self._judge(self._hidden(moved, computed)[0], moved, computed, temperature))
        return self._of_all(own_Kn, moved)

    def _hidden(self, moved: Mapping[str, Tensor], computed: Computed, given_cD: Tensor | None = None) -> Tensor:
        """Hidden states [1, c, D] after this rank's layers, of its part of the tokens.

        Args:
            moved, computed: of the microbatch.
            given_cD: hidden states of the same tokens after the layers before; none: there are none. Under ``tp`` a rank has a
                piece of them, and gives a piece.
        """
        layout: AttentionLayout = computed.layout(self.settings.attention)
        ids_c, positions_c = moved["ids_C"], computed.positions_C
        if self._splits:
            split = self._split(computed)
            layout = SplitAttention(layout, split, self.mesh.groups.sp)
            ids_c, positions_c = split.own(ids_c), split.own(positions_c)
        elif self.in_graph:
            layout.prepare(self.device)
        given = {"input_ids": ids_c[None]} if given_cD is None else {"inputs_embeds": given_cD[None]}
        return self.decoder(**given, position_ids=positions_c[None], layout=layout, use_cache=False).last_hidden_state

    def _judge(self, hidden_cD: Tensor, moved: Mapping[str, Tensor], computed: Computed, temperature: float) -> Tensor:
        """What the head says [K, n] of what is predicted from this rank's part of the tokens, on each rank of ``tp``."""
        if self.mesh.groups.tp is not None:
            hidden_cD = gather_same(hidden_cD, self.mesh.groups.tp, 0)
        index, target_ids_n = computed.predictors, moved["target_ids_N"]
        if self.mesh.groups.sp is not None:
            own_n, index = TokenSplit.of_device(moved)
            target_ids_n = target_ids_n[own_n]
        rows_nD = take_rows(hidden_cD, index)
        return torch.stack(
            self.head.predict(rows_nD, target_ids_n, temperature=temperature, chunk_bytes=self.chunk_bytes)
        )

    def _of_all(self, own_Kn: Tensor, moved: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """What the head says [N] of all that is predicted, the same on each rank of ``sp``."""
        if self.mesh.groups.sp is None:
            return tuple(own_Kn)
        whole_KN = own_Kn.new_zeros((len(own_Kn), len(moved["target_ids_N"]))).index_copy(1, moved["own_n"], own_Kn)
        return tuple(add_up(whole_KN, self.mesh.groups.sp))

    def _split(self, computed: Computed) -> TokenSplit:
        mesh = self.mesh
        return TokenSplit(len(computed.tokens_C), mesh.size("sp"), mesh.place["sp"], pieces=mesh.size("tp"))

    @property
    def _splits(self) -> bool:
        """Whether a rank has some of the tokens, at least between attention and MLP."""
        return self.mesh.groups.sp is not None or self.mesh.groups.tp is not None

    def _head(self) -> OutputHead | ValueHead:
        if is_critic(self.module):
            return ValueHead(self.module)  # it is whole on each rank of tp
        head = MeshHead(self.module)
        head.part = self._cut.vocabulary
        return head

    def _attends_in_graph(self) -> bool:
        if self._splits:
            return False
        like = torch.empty(0, dtype=self.compute, device=self.mesh.device)
        return attends_in_graph(self.settings.attention, like)

    def _optimizer(self, settings: OptimizerSettings) -> ShardedOptimizer:
        return ShardedOptimizer(self.module, settings, self.mesh, self._cut.whole, self._tied)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and parameters as the Hugging Face folder has them, each a DTensor of which this rank holds a part; float32
        where they are trained, to be rounded to ``compute`` where they are used."""
        return super().weights()


class MeshHead(OutputHead):
    """The output head where a rank computes with a part of its weight."""

    @property
    def weight(self) -> Tensor:
        return local(self._linear.weight)

    @property
    def bias(self) -> Tensor | None:
        return local(self._linear.bias)


NOTHING = Samples(
    torch.ones(1, dtype=torch.int64),
    {"ids": torch.zeros(1, dtype=torch.int64), "mask": torch.zeros(1, dtype=torch.bool)},
)
