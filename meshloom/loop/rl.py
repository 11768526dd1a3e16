"""The stage of a reinforcement-learning run in one process.

One program over a few roles, like the paper's: the rollout samples groups of responses, rewards judge them, a critic says what
was expected where an estimator asks it, advantages compare, critic and actor learn. ``loop.control`` says what comes after
what. The engine and the trainer take turns: a rollout that was begun generates when it is collected. Refuses to know: devices,
processes, files, how anything is computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshloom.algorithms.own import digests
from meshloom.config.errors import RunFault
from meshloom.config.reward_settings import component_names, reward_models, solving_component
from meshloom.config.settings import TrainSettings
from meshloom.loop.baseline import baseline_metrics
from meshloom.loop.collect import Collector, sample_records
from meshloom.loop.component_watch import ComponentWatch, component_metrics
from meshloom.loop.correction import learned, rejection_metrics, with_kept
from meshloom.loop.groups import as_groups, cut_of
from meshloom.loop.kl_control import KlWeight
from meshloom.loop.objective import PolicyObjective, reward_divergence, update_metrics, with_advantages
from meshloom.loop.reference_role import WithReference
from meshloom.loop.residents import Residents
from meshloom.loop.session import Cut, Session, Snapshot
from meshloom.loop.spread import ShortWatch, sifted_metrics
from meshloom.loop.stage import Attempt, Draw, Group, Job, Progress, StepDone
from meshloom.loop.step_metrics import SpreadWatch, batch_metrics, check_rewards, speed_metrics
from meshloom.loop.validate import Validator
from meshloom.loop.value_objective import ValueLesson, check_read, learn_values, value_metrics
from meshloom.plan.reference import refreshes
from meshloom.plan.residency import Phase
from meshloom.plan.role_numbers import computes_old_logprobs
from meshloom.rollout.protocol import Engine
from meshloom.samples import Samples, concat
from meshloom.train.model import TrainedModel
from meshloom.train.optimizer import StepStats
from meshloom.train.reference import Reference
from meshloom.train.snapshot import ModelSnapshot, ModelSnapshots


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Who does what. The reference, the critic and the validator are there where the settings ask for them."""

    actor: TrainedModel
    reference: Reference | None
    critic: TrainedModel | None = None
    engine: Engine
    collector: Collector
    validator: Validator | None

    def models(self) -> dict[str, TrainedModel]:
        """Models with weights of their own, by role."""
        found = {"actor": self.actor}
        if self.reference is not None and self.reference.model is not self.actor:
            found["reference"] = self.reference.model
        if self.critic is not None:
            found["critic"] = self.critic
        return found

    def check(self) -> None:
        """Refuse prompts that the engine could never answer."""
        self.collector.check()
        if self.validator is not None:
            self.validator.collector.check()


@dataclass(frozen=True)
class Lesson:
    """What the updates of a step reported, and what their optimizer steps did; and the same of the critic."""

    updates: list[dict[str, Any]]
    steps: list[StepStats]
    critic: ValueLesson = ValueLesson((), ())

    @property
    def num_updates(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class TakenTurn:
    """A rollout that generates and scores when it is collected."""

    stage: "RLStage"
    draws: Sequence[Draw]

    def collect(self) -> Attempt[Group[Samples]]:
        stage = self.stage
        with stage.session.clock.phase("generate"):
            stage.enter(Phase.GENERATE)
            found = stage.roles.collector.attempt(
                self.draws, deadline_s=stage.settings.rollout.deadline_s, clock=stage.session.clock
            )
        return stage.collected(found)


@dataclass
class RLStage:
    """The roles of a run, and what the algorithm does with them.

    Args:
        settings: of the run.
        session: its frame.
        roles: who does what.
        tokenizer: saved with the model.
        total_updates: of the actor, in the whole run.
        critic_updates: of the critic, in the whole run.
        critic_updates_done: of them, so far.
        critic_rows: tokens that the critic has; none if it is not known.
        residents: who is where in a phase.
        step: steps done.
        await_compiler: called before the trainer's first pass, at least.
        replay: gives groups that a file has for some draws, instead of generating them.
    """

    settings: TrainSettings
    session: Session
    roles: Roles
    tokenizer: Any
    total_updates: int
    residents: Residents
    critic_updates: int = 0
    critic_updates_done: int = 0
    critic_rows: int | None = None
    step: int = 0
    await_compiler: Callable[[], None] = lambda: None
    replay: Callable[[Sequence[Draw]], Job[Samples]] | None = None

    def __post_init__(self) -> None:
        self.spread = SpreadWatch(self.settings, self.session.display.notice)
        if reward_models(self.settings.reward) and self.takes_turns:
            for found in (self.roles.collector, self.roles.validator and self.roles.validator.collector):
                if found is not None:
                    found.enter = self.enter
        self.components = ComponentWatch(component_names(self.settings.reward), self.session.display.notice)
        self.short = ShortWatch(self.settings, self.session.display.notice)
        self.kl_weight = KlWeight.of(self.settings.algorithm)
        self.own = digests(self.settings.algorithm)
        self.scored: list[Samples] = []
        """Groups that were collected since a step was judged; only where some of them are left out."""
        self.version = 0
        self.reference_version: int | None = None
        """Of the weights that the reference took; none before the first time."""

    @property
    def takes_turns(self) -> bool:
        """Whether a rollout is on only while nothing else is."""
        return True

    @property
    def stop_wanted(self) -> bool:
        return self.session.stop_wanted

    def enter(self, phase: Phase) -> None:
        """Have everything where a phase of the step that is on needs it."""
        self.residents.enter(phase, step=self.step + 1)

    def begin_rollout(self, draws: Sequence[Draw], version: int) -> Job[Samples]:
        """A rollout of one group for each draw."""
        return TakenTurn(self, draws) if self.replay is None else self.replay(draws)

    def judge(self, groups: Sequence[Group[Samples]]) -> Samples:
        """Log-probs and values where the algorithm needs them before the update, and advantages."""
        self.roles.engine.sleep()
        batch = concat([group.content for group in groups])
        self.look(batch)
        algorithm, temperature = self.settings.algorithm, self.settings.rollout.sampling.temperature
        # A file need not say what the sampler thought; then the samples are taken to be the present policy's.
        needs_old = computes_old_logprobs(self.settings) or "sampler_logprob" not in batch.tokens
        if needs_old or self.roles.reference is not None:
            with self.session.clock.phase("log_prob"):
                self.enter(Phase.LOGPROB)
        if needs_old:
            with self.session.clock.phase("log_prob"):
                self.await_compiler()
                old = self.roles.actor.forward(batch, temperature=temperature)[0]
                batch = batch.with_tokens(old_logprob=old, sampler_logprob=batch.tokens.get("sampler_logprob", old))
        if self.roles.reference is not None:
            with self.session.clock.phase("reference"):
                self.refresh_reference()
                self.await_compiler()
                batch = batch.with_tokens(
                    reference_logprob=self.roles.reference.logprobs(batch, temperature=temperature)
                )
        if self.roles.critic is not None:
            with self.session.clock.phase("values"):
                self.enter(Phase.VALUES)
                self.await_compiler()
                check_read(batch, self.critic_rows)
                batch = batch.with_tokens(values=self.roles.critic.forward(batch)[0])
        if algorithm.proximal == "sampler":
            batch = batch.with_tokens(old_logprob=batch["sampler_logprob"])
        kl_T = reward_divergence(batch, algorithm)
        batch = with_advantages(batch, algorithm, kl_T, self.kl_weight.coefficient)
        if kl_T is not None:
            self.kl_weight.adapt(kl_T, batch, follows=not self.is_warming_up)
        batch = with_kept(batch, algorithm.correction)
        if rejection_metrics(batch).get("rejected_share") == 1.0:
            self.session.display.notice("warning: the correction rejects every token; this step teaches nothing")
        return batch

    def look(self, batch: Samples) -> None:
        """Tell of rewards that teach nothing.

        Raises:
            RunFault: if too many of them are invalid.
        """
        self.components.look(batch)
        scored, self.scored = self.scored or [batch], []
        check_rewards(concat(scored), self.settings)
        self.spread.look(batch)

    def collected(self, found: Attempt[Samples]) -> Attempt[Group[Samples]]:
        """What a rollout gave, for the control. Where it leaves groups out, those too count in the share of invalid rewards."""
        if self.settings.algorithm.filter_groups.enabled:
            self.scored += found.groups.values()
        return as_groups(found, self.settings)

    def rollout_metrics(self, batch: Samples) -> dict[str, float]:
        """What the samples of a step are, and what their rewards took."""
        validation = self.settings.validation
        solving = solving_component(self.settings.reward, validation.success_component)
        metrics = batch_metrics(batch, threshold=validation.success_threshold, component=solving)
        metrics |= component_metrics(batch, self.components.names) | self.roles.collector.scorer.take_counts()
        return metrics | baseline_metrics(batch)

    def refresh_reference(self) -> None:
        """Let the reference take the actor's weights, if that is due after the step before this one."""
        every = self.settings.reference.refresh_every_steps
        if not refreshes(self.settings) or not self.step or self.step % every:
            return
        self.residents.enter(Phase.LOGPROB, step=self.step + 1, why="refresh")
        self.roles.reference.refresh(self.roles.actor, self.version)
        self.residents.changed("reference")
        self.reference_version = self.version

    def learn(self, batch: Samples, version: int) -> Lesson:
        """The updates of a step: the critic's, then the actor's, which has none while the critic warms up."""
        updates = self.updates(batch)
        if self.roles.critic is None:
            return self.policy_updates(updates, version)
        with self.session.clock.phase("critic"):
            self.enter(Phase.UPDATE)
            values = self.value_updates(updates)
        return replace(self.policy_updates(updates, version), critic=values)

    @property
    def is_warming_up(self) -> bool:
        """Whether the critic alone learns in the step that is on."""
        return self.roles.critic is not None and self.step < self.settings.critic.warmup_steps

    def policy_updates(self, updates: Sequence[Samples], version: int) -> Lesson:
        """The actor's updates of a step, on weights of ``version``."""
        lesson = Lesson([], [])
        if self.is_warming_up:
            return lesson
        with self.session.clock.phase("update"):
            self.enter(Phase.UPDATE)
            self.await_compiler()
            for update in updates:
                objective = PolicyObjective.of(update, self.settings.algorithm, version)
                temperature = self.settings.rollout.sampling.temperature
                lesson.updates.append(self.roles.actor.forward_backward(update, objective, temperature=temperature))
                self._check_gap(lesson.updates)
                lesson.steps.append(self.roles.actor.optim_step(self.total_updates))
        return lesson

    def value_updates(self, updates: Sequence[Samples]) -> ValueLesson:
        """The critic's updates of a step: as many as the actor has, or would have but for the warm-up."""
        lesson = learn_values(self.roles.critic, updates, self.settings, self.critic_updates)
        self.critic_updates_done += len(lesson.steps)
        return lesson

    def sync(self, version: int) -> None:
        """The engine gets the weights."""
        self.version = version
        with self.session.clock.phase("sync"):
            self.enter(Phase.SYNC)
            self.roles.engine.load_weights(version)
            self.roles.engine.wake()

    def updates(self, batch: Samples) -> list[Samples]:
        """What is learned of the batch, cut by prompts, once for each epoch. Prompts without a valid sample teach nothing."""
        size = self.settings.batch.prompts_per_update or self.settings.batch.prompts_per_step
        place = torch.unique_consecutive(batch["group"], return_inverse=True)[1]
        count = int(place.max()) // size + 1
        pieces = [learned(batch.select((place // size == i).nonzero().squeeze(-1))) for i in range(count)]
        taught = [piece for piece in pieces if bool(piece["mask"].any())]
        return taught * self.settings.batch.epochs_per_step

    def report(self, done: StepDone[Samples, Lesson]) -> None:
        """Write what the step was."""
        self.step = done.step
        batch, steps = done.batch, done.learned.steps
        metrics = self.rollout_metrics(batch)
        if steps:
            metrics |= update_metrics(done.learned.updates)
            metrics["grad_norm"] = sum(step.grad_norm for step in steps) / len(steps)
            metrics["learning_rate"] = steps[-1].learning_rate
        metrics |= value_metrics(batch) | done.learned.critic.metrics()
        metrics |= {
            "updates": done.version,
            "weights_version": done.version,
            "epoch": done.epoch,
            "prompts_retried": done.retried,
            "prompts_dropped": done.dropped,
            "groups_stale": done.stale,
        }
        metrics |= rejection_metrics(batch) | self.kl_weight.metrics()
        if self.settings.algorithm.max_lag_versions or done.sifted is not None:
            metrics["lag_versions"] = done.lag
        if refreshes(self.settings):
            metrics["reference_version"] = self.reference_version or 0
        if done.sifted is not None:
            metrics |= sifted_metrics(done.sifted)
            self.short.look(done.step, done.sifted)
        metrics |= speed_metrics(batch, self.session.clock, self.roles.actor)
        self.session.log("train", metrics, step=done.step)
        count = self.settings.logging.samples_per_step
        shown = batch if count is None else batch.select(range(min(count, len(batch))))
        prompts, step = self.roles.collector.prompts, done.step
        exact = self.settings.logging.sampler_logprobs
        self.session.log_samples(lambda: sample_records(shown, prompts, step=step, kind="train", exact=exact))

    def validate(self, step: int) -> float | None:
        """The accuracy on held-out prompts, if there are any."""
        if self.roles.validator is None:
            return None
        with self.session.clock.phase("validate"):
            self.residents.enter(Phase.GENERATE, step=step, why="validate")
            found = self.roles.validator.run(step, self.session.clock)
        self.session.log("validation", found.metrics, step=step)
        self.session.log_samples(lambda: found.records)
        return found.metrics.get("accuracy")

    def save(self, progress: Progress, waiting: Sequence[Group[Samples]], score: float | None) -> None:
        """A checkpoint: the model, where the run stands, and the groups that wait."""
        with self.session.clock.phase("save"):
            self.residents.enter(Phase.UPDATE, step=progress.step, why="save")
            cut = cut_of(progress, waiting, self.state())
            self.session.save(self.snapshot, cut, step=progress.step, score=score)

    def state(self) -> dict[str, Any]:
        """What of the algorithm a checkpoint holds beside the model: JSON values."""
        state = {"kl_coefficient": self.kl_weight.coefficient, "own": self.own}
        return {**state, "critic_updates": self.critic_updates_done, "reference_version": self.reference_version}

    def load(self, cut: Cut) -> None:
        """Stand where a run was saved."""
        self.step = cut.values["step"]
        self.version = cut.values["version"]
        kept = cut.values["algorithm"]
        self.kl_weight.coefficient, self.critic_updates_done = kept["kl_coefficient"], kept["critic_updates"]
        self.reference_version = kept["reference_version"]
        for name in (name for name, digest in kept["own"].items() if self.own.get(name) != digest):
            text = f"warning: the file of algorithm.{name} has changed since the checkpoint: this run does not repeat itself"
            self.session.display.notice(text)

    def snapshot(self) -> Snapshot:
        """The models that change, as they are now."""
        trained = self.snapshot_of_trained()
        if self.reference_version is None:
            return trained
        self.residents.enter(Phase.LOGPROB, step=self.step, why="save")
        return WithReference(trained, self.snapshot_of_reference())

    def snapshot_of_reference(self) -> Snapshot:
        """The reference, which was refreshed."""
        return ModelSnapshot.take(self.roles.reference.model, self.tokenizer)

    def snapshot_of_trained(self) -> Snapshot:
        """The actor and the critic as they are now."""
        trained = [model for model in (self.roles.actor, self.roles.critic) if model is not None]
        return ModelSnapshots([ModelSnapshot.take(model, self.tokenizer) for model in trained])

    def _check_gap(self, reports: list[dict[str, Any]]) -> None:
        bound = self.settings.algorithm.max_sampler_gap
        gap = reports[0]["fresh_gap"].summary().get("mean_abs", 0.0)
        if bound is not None and len(reports) == 1 and gap > bound:
            raise RunFault(
                f"sampler and trainer disagree: mean |Δ log-prob| is {gap:.3g}",
                where="algorithm.max_sampler_gap",
                why=f"more than {bound:g}; the actor was not changed by this step",
                fix="use the same dtype and temperature for both, top_p 1, top_k 0 and min_p 0, or raise the bound",
            )
