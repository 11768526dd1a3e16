"""A model whose layers are on several ranks, one stage each: microbatches pass through as in a pipe.

Owns: which microbatch a stage computes when, and what passes between stages. Refuses to know: which layers a stage has. Always
holds: what ``meshloom.train.mesh_model`` says; a stage keeps the activations of no more microbatches than there are stages
after it, and one; hidden states pass with as many tokens as a microbatch has, and nothing is padded.

The order is one forward, one backward (1F1B, Narayanan et al. 2021, arXiv:2104.04473): a stage first computes as many
microbatches forward as there are stages after it, then one backward for each further one forward, then the rest backward.

Legend: c tokens of a microbatch on a rank, D hidden, n predicted from them.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshloom.samples import Samples
from meshloom.train.head import OutputHead
from meshloom.train.mesh_model import NOTHING, MeshModel
from meshloom.train.model import Loss
from meshloom.train.sharing import Computed
from meshloom.train.value_head import ValueHead, is_critic


@dataclass
class Pass:
    """A microbatch on its way through a stage.

    Args:
        microbatch: none for an empty one.
        computed, moved: of it.
        given_cD: hidden states from the stage before; none at the first.
        out: what is differentiated: hidden states for the next stage, or a share of the loss.
    """

    microbatch: Samples | None
    computed: Computed
    moved: dict[str, Tensor]
    given_cD: Tensor | None = None
    out: Tensor | None = None


class Neighbours:
    """The stages before and after this one.

    Args:
        group: of the pipeline, in the order of its stages.
        stage: of this rank.
        dtype: of hidden states.
        device: of this rank.
        width: of hidden states.
    """

    def __init__(
        self, group: dist.ProcessGroup, stage: int, *, dtype: torch.dtype, device: torch.device, width: int
    ) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self.before = self.ranks[stage - 1] if stage > 0 else None
        self.after = self.ranks[stage + 1] if stage + 1 < len(self.ranks) else None
        self._group, self._dtype, self._device, self._width = group, dtype, device, width

    def exchange(
        self, *, to: int | None = None, sent_cD: Tensor | None = None, of: int | None = None, tokens: int = 0
    ) -> Tensor | None:
        """Send hidden states, or their gradient, to a stage and take some from one, at the same time; either may be none.

        Args:
            to: rank that is sent to.
            sent_cD: what is sent.
            of: rank that is taken from.
            tokens: that come from there.
        """
        taken = self.exchange_all(
            [] if to is None or sent_cD is None else [(to, sent_cD)], [] if of is None else [(of, tokens)]
        )
        return taken[0] if taken else None

    def exchange_all(self, sent: Sequence[tuple[int, Tensor]], taken: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Send to ranks and take from some, at the same time; what is taken, in its order.

        Args:
            sent: to which rank, and what; what one rank is sent must be in the order in which it takes it.
            taken: from which rank, and how many tokens.
        """
        found = [torch.empty(tokens, self._width, dtype=self._dtype, device=self._device) for _, tokens in taken]
        calls = [dist.P2POp(dist.isend, each_cD.detach().contiguous(), to, self._group) for to, each_cD in sent]
        calls += [
            dist.P2POp(dist.irecv, each_cD, of, self._group) for each_cD, (of, _) in zip(found, taken, strict=True)
        ]
        for work in dist.batch_isend_irecv(calls) if calls else []:
            work.wait()
        return found


class PipelineModel(MeshModel):
    """One model over the ranks of a mesh with an axis ``pp``. Only ranks of the last stage know log-probs and losses, and those
    are the ones that ``TrainMesh.answers`` names; the others return zeros, or ``loss`` alone."""

    def _ask(self, microbatches: list[Samples | None], temperature: float) -> list[tuple[Tensor, ...]]:
        links, found = self._links(), []
        for microbatch in microbatches:
            work = self._begin(microbatch)
            work.given_cD = links.exchange(of=links.before, tokens=self._tokens(work))
            out = self._run(work, temperature, last=links.after is None)
            links.exchange(to=links.after, sent_cD=out)
            found.append(self._predicted(work, out))
        return found

    def _learn(self, microbatches: list[Samples | None], loss: Loss, temperature: float) -> list[dict[str, Any]]:
        links = self._links()
        works = [self._begin(microbatch) for microbatch in microbatches]
        ahead = min(self.mesh.size("pp") - self.mesh.place["pp"] - 1, len(works))
        waiting: deque[Pass] = deque()
        reports: list[dict[str, Any]] = []

        def take(index: int) -> Tensor | None:
            if index >= len(works):
                return None
            return links.exchange(of=links.before, tokens=self._tokens(works[index]))

        def forward(work: Pass, given_cD: Tensor | None) -> None:
            work.given_cD = None if given_cD is None else given_cD.requires_grad_()
            work.out = self._run(work, temperature, last=links.after is None)
            if links.after is None:
                work.out, report = self._loss_of(work.microbatch, self._predicted(work, work.out), loss)
                reports.append(report)
            waiting.append(work)

        for work in works[:ahead]:
            forward(work, links.exchange(of=links.before, tokens=self._tokens(work)))
            links.exchange(to=links.after, sent_cD=work.out)
        given_cD = take(ahead)
        for index in range(ahead, len(works)):
            forward(works[index], given_cD)
            grad_cD = links.exchange(
                to=links.after, sent_cD=works[index].out, of=links.after, tokens=self._tokens(waiting[0])
            )
            sent_cD = run_backward(waiting.popleft(), grad_cD)
            further = index + 1 < len(works)
            given_cD = links.exchange(
                to=links.before,
                sent_cD=sent_cD,
                of=links.before if further else None,
                tokens=self._tokens(works[index + 1]) if further else 0,
            )
        while waiting:
            grad_cD = links.exchange(of=links.after, tokens=self._tokens(waiting[0]))
            links.exchange(to=links.before, sent_cD=run_backward(waiting.popleft(), grad_cD))
        return reports

    def _begin(self, microbatch: Samples | None) -> Pass:
        return Pass(microbatch, *self._send(microbatch or NOTHING))

    def _run(
        self, work: Pass, temperature: float, *, last: bool, within: AbstractContextManager[None] | None = None
    ) -> Tensor:
        """A stage's hidden states [c, D], or, at the last of all, what the head says [K, n].

        Args:
            work: to compute.
            temperature: of the log-probs.
            last: whether the stage is the last of all.
            within: that the layers compute in.
        """

        def run() -> Tensor:
            with within or nullcontext():
                hidden_1cD = self._hidden(work.moved, work.computed, work.given_cD)
            return self._judge(hidden_1cD[0], work.moved, work.computed, temperature) if last else hidden_1cD

        return self.root(run) if last else self.root(run)[0]

    def _predicted(self, work: Pass, out: Tensor) -> tuple[Tensor, ...]:
        """What the head says of all tokens, [T]; zeros but at the last stage."""
        microbatch = work.microbatch or NOTHING
        if self.mesh.place["pp"] < self.mesh.size("pp") - 1:
            zeros_T = torch.zeros(microbatch.num_tokens, device=self.device)
            return tuple(zeros_T for _ in self.head.columns)
        return self._on_tokens(microbatch, work.moved, self._of_all(out, work.moved))

    def _tokens(self, work: Pass) -> int:
        """Tokens whose hidden states this rank is sent and sends."""
        return self._split(work.computed).each // self.mesh.size("tp")

    def _links(self) -> Neighbours:
        return Neighbours(
            self.mesh.groups.pp,
            self.mesh.place["pp"],
            dtype=self.compute,
            device=self.device,
            width=self.decoder.config.get_text_config().hidden_size,
        )

    def _head(self) -> "OutputHead | ValueHead | HeadElsewhere":
        if self.mesh.place["pp"] < self.mesh.size("pp") - 1:
            columns = (ValueHead if is_critic(self.module) else OutputHead).columns
            return HeadElsewhere(torch.empty(0, 0, dtype=self.compute, device=self.mesh.device), columns)
        return super()._head()


@dataclass
class HeadElsewhere:
    """What a stage has that does not have the head: a weight without rows, and the names of what the head says."""

    weight: Tensor
    columns: tuple[str, ...]
    gradient_total: None = None


def run_backward(work: Pass, grad_cD: Tensor | None) -> Tensor | None:
    """Gradient of what the stage before sent; the pass's activations are freed."""
    if grad_cD is None:
        work.out.backward()
    else:
        torch.autograd.backward(work.out, grad_cD)
    given_cD, work.out, work.given_cD = work.given_cD, None, None
    return None if given_cD is None else given_cD.grad
