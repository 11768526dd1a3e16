"""``meshloom sft``: supervised fine-tuning on worked responses.

Owns: the loop and its loss: mean negative log-probability over all response tokens of an update. A step is one update. The same
mean over held-out rows is measured before the first, now and then, and after the last.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from meshloom.algorithms.reduce import Denominators, denominators, reduce
from meshloom.config.settings import SftSettings
from meshloom.data.order import PromptOrder
from meshloom.data.tokenizer import load_tokenizer
from meshloom.loop.begun import takes_up
from meshloom.loop.build import (
    build_actor,
    find_checkpoint,
    finish_plan,
    open_session,
    require_vocabulary,
    set_end_tokens,
)
from meshloom.loop.control import due
from meshloom.loop.held_out import held_out_metrics
from meshloom.loop.residents import Residents, check_room, folder_of
from meshloom.loop.session import Cut, Session, Snapshot, read_cut, set_random_states
from meshloom.loop.sft_data import SftData, as_samples, lengths_of, load_examples
from meshloom.observe.loggers import check_loggers
from meshloom.observe.run_folder import check_free
from meshloom.plan.placement import Role
from meshloom.plan.residency import Phase
from meshloom.plan.stays import sft_stays
from meshloom.samples import Samples
from meshloom.train.ahead import CompileAhead
from meshloom.train.load import check_model_folder, free_memory, pick_device
from meshloom.train.model import LossParts, MicrobatchBound, TrainedModel
from meshloom.train.snapshot import ModelSnapshot, restore


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """−log π of each response token, averaged over the tokens of the update."""

    totals: Denominators

    def __call__(self, microbatch: Samples, logprob_T: Tensor, entropy_T: Tensor) -> LossParts:
        mask_T = microbatch["mask"]
        loss = reduce(-logprob_T, mask_T, microbatch.lengths, "token-mean", self.totals)
        return LossParts(loss, {"entropy": (entropy_T.detach() * mask_T).sum()})


class Boundaries(Protocol):
    """``loop.residents.Residents``, here or on workers."""

    def enter(self, phase: Phase, *, step: int) -> None: ...


@dataclass
class SftProgram:
    """A supervised run and where it stands: ``step`` updates done."""

    settings: SftSettings
    session: Session
    model: TrainedModel
    data: SftData
    order: PromptOrder
    tokenizer: Any
    total_updates: int
    step: int = 0
    residents: Boundaries | None = None
    """Who has the optimizer away between updates; none where it stays."""
    score: float | None = None
    """How good the model is after this step, larger is better; none where it was not measured."""

    def run(self) -> int:
        """Train until the last step or the wish to stop; the exit code."""
        session, validation = self.session, self.settings.validation
        if self.step == 0 and validation.before_training and not session.stop_wanted:
            self.validate()
        while self.step < session.steps and not session.stop_wanted:
            self.update()
            is_last = validation.after_training and self.step == session.steps
            if is_last or due(validation.every_steps, self.step):
                self.validate()
            if due(self.settings.checkpoint.every_steps, self.step):
                self.save()
        if self.step > session.saved_step and (self.settings.checkpoint.at_end or self.step < session.steps):
            self.save()
        return session.end(step=self.step, stopped=self.step < session.steps)

    def update(self) -> None:
        """One step: one update."""
        with self.session.clock.phase("update"):
            indices = self.order.take(self.settings.batch.samples_per_update)
            examples = [self.data.examples[i] for i in indices]
            batch = as_samples(examples)
            totals = denominators(batch["mask"], batch.lengths)
            if self.residents is not None:
                self.residents.enter(Phase.UPDATE, step=self.step + 1)
            report = self.model.forward_backward(batch, NegativeLogLikelihood(totals), temperature=1.0)
            last = self.model.optim_step(self.total_updates)
        self.step, self.score = self.step + 1, None
        seconds = sum(self.session.clock.seconds().values())
        metrics = {
            "loss": float(report["loss"]),
            "entropy": float(report["entropy"]) / totals.num_tokens,
            "grad_norm": last.grad_norm,
            "learning_rate": last.learning_rate,
            "tokens_per_second": batch.num_tokens / seconds,
            **self.model.take_utilization(seconds),
            **lengths_of(examples),
            "epoch": self.order.epoch + self.order.position / self.order.num_prompts,
        }
        self.session.log("sft", metrics, step=self.step)

    def validate(self) -> None:
        """Measure the loss on held-out rows, if there are any."""
        if not self.data.held_out:
            return
        with self.session.clock.phase("validate"):
            metrics = held_out_metrics(self.model, self.data.held_out)
        self.score = -metrics["loss"]
        self.session.log("validation", metrics, step=self.step)

    def save(self) -> None:
        """Everything that decides the future, as of now."""
        with self.session.clock.phase("save"):
            cut = Cut({"step": self.step, "order": self.order.state()}, {})
            self.session.save(self.snapshot, cut, step=self.step, score=self.score)

    def snapshot(self) -> Snapshot:
        """The model as it is now."""
        return ModelSnapshot.take(self.model, self.tokenizer)


def run_sft(settings: SftSettings, *, resume: bool, ahead: CompileAhead | None = None) -> int:
    """Fine-tune; the exit code: 0 done, 130 stopped and saved.

    Args: as ``run_training``.

    Raises:
        UserError: if the input is bad; nothing has been written then.
    """
    resume = takes_up(settings, resume=resume)
    check_model_folder(settings.model.path)
    memory = free_memory(device := pick_device(settings.device))
    check_free(settings.run_dir, resume=resume)
    check_loggers(settings.logging.loggers)
    if ahead is not None and device.type == "cuda":
        ahead.begin(settings, str(device))
    checkpoint, settings = find_checkpoint(settings) if resume else (None, settings)
    cut = None if checkpoint is None else read_cut(checkpoint)
    tokenizer = load_tokenizer(settings.model.path)
    data = load_examples(settings, tokenizer)
    plan, settings = finish_plan(settings, len(data.examples), memory)
    order = PromptOrder(len(data.examples), settings.seed, settings.data.shuffle)
    bound = MicrobatchBound(settings.batch.tokens_per_microbatch, settings.batch.samples_per_microbatch)
    model = build_actor(
        settings.model, settings.optimizer, bound, device=settings.device, seed=settings.seed, checkpoint=checkpoint
    )
    require_vocabulary(model, data.ids)
    set_end_tokens(model.module, settings.data, tokenizer)
    with ExitStack() as resources:
        residents = resources.enter_context(_residents(settings, model)) if is_streaming(settings) else None
        if cut is not None and checkpoint is not None:  # by now what moves is never whole on the device
            order.load(cut.values["order"])
            restore(model, checkpoint, updates=cut.values["step"])
        session = resources.enter_context(open_session(settings, plan, model, resume=resume, cut=cut))
        if residents is not None:
            residents.log = session.folder.log_memory
        for notice in data.notices():
            session.display.notice(notice)
        step = 0 if cut is None else cut.values["step"]
        program = SftProgram(
            settings, session, model, data, order, tokenizer, plan.updates, step=step, residents=residents
        )
        set_random_states(cut, settings.seed)
        if ahead is not None:
            ahead.wait()
        return program.run()


def is_streaming(settings: SftSettings) -> bool:
    """Whether the optimizer is away but for its turns in an update."""
    return any(stay.moves for stay in sft_stays(settings))


def _residents(settings: SftSettings, model: TrainedModel) -> Residents:
    """What has the optimizer elsewhere; its records go nowhere before there is a run folder."""
    planned, models, folder = sft_stays(settings), {Role.ACTOR: model}, folder_of(settings)
    check_room(folder, planned, models)
    return Residents(planned, models, folder=folder, log=lambda _: None)
