"""The reinforcement-learning loop.

One program over four roles, like the paper's: the rollout samples groups of responses, rewards judge them, advantages
compare them, the actor learns. The bounded buffer stands between rollout and training; with ``max_lag_versions`` 0
every sample is made by the weights it trains. Refuses to know: devices, processes, files, how anything is computed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshloom.config.errors import RunFault
from meshloom.config.settings import KlPlace, TrainSettings
from meshloom.data.order import PromptOrder
from meshloom.loop.buffer import GroupBuffer
from meshloom.loop.collect import Collected, Collector, Draw, sample_records
from meshloom.loop.objective import PolicyObjective, learned, update_metrics, with_advantages
from meshloom.loop.session import Cut, Session, due
from meshloom.loop.step_metrics import SpreadWatch, batch_metrics, check_rewards, speed_metrics
from meshloom.loop.validate import Validator
from meshloom.rollout.protocol import Engine
from meshloom.samples import Samples, concat
from meshloom.samples.store import from_parts, to_parts
from meshloom.train.model import TrainedModel
from meshloom.train.optimizer import StepStats
from meshloom.train.reference import Reference
from meshloom.train.snapshot import ModelSnapshot


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Who does what. The reference and the validator are there where the settings ask for them."""

    actor: TrainedModel
    reference: Reference | None
    engine: Engine
    collector: Collector
    validator: Validator | None

    def check(self) -> None:
        """Refuse prompts that the engine could never answer."""
        self.collector.check()
        if self.validator is not None:
            self.validator.collector.check()


@dataclass
class RLProgram:
    """A run and where it stands.

    Args:
        order: of the prompts, already where the run stands.
        step: steps done.
        version: of the actor's weights: optimizer updates made.
        draws: prompts drawn so far.
        accuracy: of the validation after this step, if there was one.
        await_compiler: called before the trainer's first pass, at least.
    """

    settings: TrainSettings
    session: Session
    roles: Roles
    order: PromptOrder
    buffer: GroupBuffer
    tokenizer: Any
    total_updates: int
    step: int = 0
    version: int = 0
    draws: int = 0
    accuracy: float | None = None
    await_compiler: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.spread = SpreadWatch(self.settings, self.session.display.notice)

    def run(self) -> int:
        """Train until the last step or the wish to stop; the exit code."""
        if self.step == 0 and self.settings.validation.before_training and not self.session.stop_wanted:
            self.validate()
        while self.step < self.session.steps and not self.session.stop_wanted:
            collected = self.roll_out()
            self.roles.engine.sleep()
            batch = self.judge(concat(self.buffer.take(self.settings.batch.prompts_per_step)))
            updates, steps = self.learn(batch)
            self.step, self.accuracy = self.step + 1, None
            self.report(batch, collected, updates, steps)
            if self.step == self.session.steps or due(self.settings.validation.every_steps, self.step):
                self.validate()
            if due(self.settings.checkpoint.every_steps, self.step):
                self.save()
        if self.step > self.session.saved_step:
            self.save()
        return self.session.end(step=self.step, stopped=self.step < self.session.steps)

    def roll_out(self) -> Collected:
        """Fill the buffer with the groups of a step."""
        total = Collected()
        with self.session.clock.phase("generate"):
            self.buffer.drop_stale(self.version)
            missing = self.settings.batch.prompts_per_step - len(self.buffer)
            if missing > 0:
                draws = [Draw(self.draws + i, prompt) for i, prompt in enumerate(self.order.take(missing))]
                self.draws += missing
                deadline_s = self.settings.rollout.deadline_s
                total = self.roles.collector.collect(draws, deadline_s=deadline_s, clock=self.session.clock)
                self.buffer.put(total.groups)
        if not len(self.buffer):
            raise RunFault(
                "no group of this step was finished",
                where="rollout.deadline_s",
                why=f"{len(total.dropped)} prompts ran out of {self.settings.rollout.deadline_s:g} s twice",
                fix="a longer deadline, shorter responses, or fewer prompts a step",
            )
        return total

    def judge(self, batch: Samples) -> Samples:
        """Log-probs where the algorithm needs them before the update, and advantages."""
        check_rewards(batch, self.settings)
        self.spread.look(batch)
        algorithm, temperature = self.settings.algorithm, self.settings.rollout.sampling.temperature
        if self._needs_old_logprob():
            with self.session.clock.phase("log_prob"):
                self.await_compiler()
                batch = batch.with_tokens(old_logprob=self.roles.actor.forward(batch, temperature=temperature)[0])
        if self.roles.reference is not None:
            with self.session.clock.phase("reference"):
                self.await_compiler()
                batch = batch.with_tokens(
                    reference_logprob=self.roles.reference.logprobs(batch, temperature=temperature)
                )
        return with_advantages(batch, algorithm)

    def learn(self, batch: Samples) -> tuple[list[dict[str, Any]], list[StepStats]]:
        """The updates of a step: what each reported, and what its optimizer step did."""
        reports, steps = [], []
        with self.session.clock.phase("update"):
            self.await_compiler()
            for update in self.updates(batch):
                objective = PolicyObjective.of(update, self.settings.algorithm)
                temperature = self.settings.rollout.sampling.temperature
                reports.append(self.roles.actor.forward_backward(update, objective, temperature=temperature))
                self._check_gap(reports)
                steps.append(self.roles.actor.optim_step(self.total_updates))
                self.version += 1
        with self.session.clock.phase("sync"):
            self.roles.engine.load_weights(self.version)
            self.roles.engine.wake()
        return reports, steps

    def updates(self, batch: Samples) -> list[Samples]:
        """What is learned of the batch, cut by prompts, once for each epoch. Prompts without a valid sample teach nothing."""
        size = self.settings.batch.prompts_per_update or self.settings.batch.prompts_per_step
        place = torch.unique_consecutive(batch["group"], return_inverse=True)[1]
        count = int(place.max()) // size + 1
        pieces = [learned(batch.select((place // size == i).nonzero().squeeze(-1))) for i in range(count)]
        taught = [piece for piece in pieces if bool(piece["mask"].any())]
        return taught * self.settings.batch.epochs_per_step

    def report(
        self, batch: Samples, collected: Collected, updates: list[dict[str, Any]], steps: list[StepStats]
    ) -> None:
        """Write what the step was."""
        metrics = batch_metrics(batch, threshold=self.settings.validation.success_threshold)
        if steps:
            metrics |= update_metrics(updates)
            metrics["grad_norm"] = sum(step.grad_norm for step in steps) / len(steps)
            metrics["learning_rate"] = steps[-1].learning_rate
        metrics |= {
            "updates": self.version,
            "weights_version": self.version,
            "epoch": self.order.epoch + self.order.position / self.order.num_prompts,
            "prompts_retried": collected.retried,
            "prompts_dropped": len(collected.dropped),
            "groups_stale": self.buffer.dropped_stale,
        }
        metrics |= speed_metrics(batch, self.session.clock, self.roles.actor)
        self.session.log("train", metrics, step=self.step)
        count = self.settings.logging.samples_per_step
        shown = batch if count is None else batch.select(range(min(count, len(batch))))
        prompts, step = self.roles.collector.prompts, self.step
        self.session.log_samples(lambda: sample_records(shown, prompts, step=step, kind="train"))

    def validate(self) -> None:
        if self.roles.validator is None:
            return
        with self.session.clock.phase("validate"):
            found = self.roles.validator.run(self.step, self.session.clock)
        self.accuracy = found.metrics.get("accuracy")
        self.session.log("validation", found.metrics, step=self.step)
        self.session.log_samples(lambda: found.records)

    def save(self) -> None:
        """Everything that decides the future, as of now."""
        with self.session.clock.phase("save"):
            tensors: dict[str, torch.Tensor] = {}
            meta: dict[str, list[Any]] = {}
            groups = []
            if len(self.buffer):
                tensors, meta = to_parts(concat(self.buffer.groups))
                groups = [len(group) for group in self.buffer.groups]
            values = {
                "step": self.step,
                "version": self.version,
                "draws": self.draws,
                "order": self.order.state(),
                "buffer": {
                    "groups": groups,
                    "meta": meta,
                    "dropped_stale": self.buffer.dropped_stale,
                },
            }
            cut = Cut(values, {f"buffer/{name}": tensor for name, tensor in tensors.items()})
            self.session.save(
                ModelSnapshot.take(self.roles.actor, self.tokenizer), cut, step=self.step, score=self.accuracy
            )

    def load(self, cut: Cut) -> None:
        """Stand where a checkpoint was made."""
        values = cut.values
        self.step, self.version, self.draws = values["step"], values["version"], values["draws"]
        tensors = {name.split("/", 1)[1]: t for name, t in cut.tensors.items() if name.startswith("buffer/")}
        groups = values["buffer"]["groups"]
        parts = from_parts(tensors, values["buffer"]["meta"]).split(groups) if groups else []
        self.buffer = replace(self.buffer, groups=parts, dropped_stale=values["buffer"]["dropped_stale"])
        self.roles.engine.load_weights(self.version)

    def _needs_old_logprob(self) -> bool:
        batch, algorithm = self.settings.batch, self.settings.algorithm
        whole_step = batch.prompts_per_update in (None, batch.prompts_per_step)
        one_update = whole_step and batch.epochs_per_step == 1
        return not one_update or algorithm.max_lag_versions > 0 or algorithm.kl is KlPlace.REWARD

    def _check_gap(self, reports: list[dict[str, Any]]) -> None:
        bound = self.settings.algorithm.max_sampler_gap
        gap = reports[0]["gap"].summary().get("mean_abs", 0.0)
        if bound is not None and len(reports) == 1 and gap > bound:
            raise RunFault(
                f"sampler and trainer disagree: mean |Δ log-prob| is {gap:.3g}",
                where="algorithm.max_sampler_gap",
                why=f"more than {bound:g}; no weight was changed by this step",
                fix="use the same dtype and temperature for both, top_p 1, top_k 0 and min_p 0, or raise the bound",
            )
