"""A model of which each rank of a pipeline has several stages: less time without work, for more that is sent and kept.

Owns: carrying out the order of ``plan.pipeline_order``. Refuses to know: why that order is as it is, which layers a stage has.
Always holds: what ``meshloom.train.pipeline`` says, but that a rank has ``Interleaving.in_flight`` passes through a stage in
flight at most; whatever one tick makes for other ranks is in one exchange at its end, so no rank waits for one that waits for
it.

Legend: c tokens of a microbatch on a rank, D hidden.
"""

from typing import Any

import torch
from torch import Tensor

from meshloom.plan.pipeline_order import Interleaving, Task
from meshloom.samples import Samples
from meshloom.train.model import Loss
from meshloom.train.pipeline import Pass, PipelineModel, run_backward
from meshloom.train.shard import gather_ahead
from meshloom.train.stages import StageViews


class InterleavedModel(PipelineModel):
    """See ``PipelineModel``.

    Args:
        stages_per_device: stages of each rank, two or more.
        args, options: of ``MeshModel``.
    """

    def __init__(self, *args: Any, stages_per_device: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.stages_per_device = stages_per_device
        self.views = StageViews(self.decoder, self.mesh, stages_per_device)

    def _ask(self, microbatches: list[Samples | None], temperature: float) -> list[tuple[Tensor, ...]]:
        passage = Passage(self, microbatches, temperature, loss=None)
        passage.run()
        return passage.predicted

    def _learn(self, microbatches: list[Samples | None], loss: Loss, temperature: float) -> list[dict[str, Any]]:
        passage = Passage(self, microbatches, temperature, loss)
        passage.run()
        return passage.reports


class Passage:
    """Microbatches on their way through all stages, as one rank sees it.

    Args:
        model: whose stages.
        microbatches: none for an empty one.
        temperature: of the log-probs.
        loss: none where nothing is learned.
    """

    def __init__(
        self, model: InterleavedModel, microbatches: list[Samples | None], temperature: float, loss: Loss | None
    ) -> None:
        self._model, self._temperature, self._loss = model, temperature, loss
        self._place, size = model.mesh.place["pp"], model.mesh.size("pp")
        self._before, self._after = (self._place - 1) % size, (self._place + 1) % size
        self._links = model._links()
        self._order = Interleaving(
            devices=size, stages_per_device=model.stages_per_device, microbatches=len(microbatches)
        )
        self._begun = [model._begin(microbatch) for microbatch in microbatches]
        self._passes: dict[Task, Pass] = {}
        self._given: dict[Task, Tensor] = {}
        """Hidden states that came for a stage of this rank."""
        self._gradients: dict[Task, Tensor] = {}
        """Gradients that came, of what a stage of this rank has sent."""
        self._found: dict[int, tuple[Tensor, ...]] = {}
        self.reports: list[dict[str, Any]] = []
        """What the loss said, on ranks of the last stage."""

    @property
    def predicted(self) -> list[tuple[Tensor, ...]]:
        """What the head says of each microbatch's tokens, [T]; zeros but on ranks of the last stage."""
        nothing = torch.empty(0)
        return [
            self._found[index] if index in self._found else self._model._predicted(begun, nothing)
            for index, begun in enumerate(self._begun)
        ]

    def run(self) -> None:
        """Compute everything, together with the other ranks."""
        learns = self._loss is not None
        for tick in range(self._order.num_ticks(backward=learns)):
            ahead = self._order.forward(self._place, tick)
            hidden_cD = None if ahead is None else self._forward(ahead)
            back = self._order.backward(self._place, tick) if learns else None
            grad_cD = None if back is None else self._backward(back)
            self._exchange(tick, hidden_cD, grad_cD)

    def _forward(self, task: Task) -> Tensor | None:
        """Hidden states for the stage after; none from the last."""
        model, begun, last = self._model, self._begun[task.microbatch], task.stage == self._order.num_stages - 1
        work = Pass(begun.microbatch, begun.computed, begun.moved, self._given.pop(task, None))
        if self._loss is not None:
            self._passes[task] = work
            if work.given_cD is not None:
                work.given_cD.requires_grad_()
        work.out = model._run(work, self._temperature, last=last, within=model.views.alone(task.stage))
        if not last:
            return work.out
        predicted = model._predicted(work, work.out)
        if self._loss is None:
            self._found[task.microbatch] = predicted
        else:
            work.out, report = model._loss_of(work.microbatch, predicted, self._loss)
            self.reports.append(report)
        return None

    def _backward(self, task: Task) -> Tensor | None:
        """Gradient of what the stage before has sent; none from the first."""
        gather_ahead(self._model.root, self._model.views.layers_of(task.stage))
        return run_backward(self._passes.pop(task), self._gradients.pop(task, None))

    def _exchange(self, tick: int, hidden_cD: Tensor | None, grad_cD: Tensor | None) -> None:
        """Send what this rank has made in a tick, and take what its neighbours have made in it; hidden states first, as two
        ranks are both neighbours of each other on either side."""
        ranks = self._links.ranks
        sent = [(ranks[self._after], hidden_cD)] if hidden_cD is not None else []
        sent += [(ranks[self._before], grad_cD)] if grad_cD is not None else []
        coming: list[tuple[dict[Task, Tensor], Task, int]] = []
        ahead = self._order.forward(self._before, tick)
        if ahead is not None and ahead.stage < self._order.num_stages - 1:
            coming.append((self._given, Task(ahead.microbatch, ahead.stage + 1), self._before))
        back = self._order.backward(self._after, tick) if self._loss is not None else None
        if back is not None and back.stage > 0:
            coming.append((self._gradients, Task(back.microbatch, back.stage - 1), self._after))
        sizes = [(ranks[place], self._model._tokens(self._begun[task.microbatch])) for _, task, place in coming]
        for (kept, task, _), taken_cD in zip(coming, self._links.exchange_all(sent, sizes), strict=True):
            kept[task] = taken_cD
