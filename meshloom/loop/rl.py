"""The algorithm of a reinforcement-learning run, step by step.

One program over a few roles, like the paper's: the rollout samples groups of responses, rewards judge them, a critic says what
was expected where an estimator asks it, advantages compare, critic and actor learn. ``loop.control`` says what comes after
what::

    groups = begin_rollout(draws).collect()     responses to a step's prompts, and their rewards
    batch  = judge(groups)                      log-probs, values, advantages
    lesson = learn(batch)                       the critic's updates, then the actor's
    sync()                                      the engine samples with the new weights

The engine and the trainer take turns: a rollout that was begun generates when it is collected. Owns: what is computed in a
step, in which order. Refuses to know: devices, processes, files, how anything is computed; records (``loop.stage_frame``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from meshloom.loop.correction import learned, rejection_metrics, with_kept
from meshloom.loop.groups import as_groups
from meshloom.loop.objective import PolicyObjective, check_sampler_gap, reward_divergence, with_advantages
from meshloom.loop.roles import Lesson
from meshloom.loop.stage import Attempt, Draw, Group, Job
from meshloom.loop.stage_frame import StageFrame
from meshloom.loop.value_objective import ValueLesson, check_read, learn_values
from meshloom.plan.reference import refreshes
from meshloom.plan.residency import Phase
from meshloom.plan.role_numbers import computes_old_logprobs
from meshloom.samples import Samples, concat


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
class RLStage(StageFrame):
    """What the algorithm does with the roles of a run. Arguments as of ``StageFrame``."""

    def begin_rollout(self, draws: Sequence[Draw], version: int) -> Job[Samples]:
        """A rollout of one group for each draw."""
        return TakenTurn(self, draws) if self.replay is None else self.replay(draws)

    def collected(self, found: Attempt[Samples]) -> Attempt[Group[Samples]]:
        """What a rollout gave, for the control. Where it leaves groups out, those too count in the share of invalid rewards."""
        if self.settings.algorithm.filter_groups.enabled:
            self.scored += found.groups.values()
        return as_groups(found, self.settings)

    def judge(self, groups: Sequence[Group[Samples]]) -> Samples:
        """What a step learns from: its samples, with what the policies and the critic say of each token, and advantages."""
        self.roles.engine.sleep()
        batch = self.begun(concat([group.content for group in groups]))
        self.look(batch)
        batch = self.with_logprobs(batch)
        batch = self.with_values(batch)
        if self.settings.algorithm.proximal == "sampler":
            batch = batch.with_tokens(old_logprob=batch["sampler_logprob"])
        batch = self.with_advantages(batch)
        batch = with_kept(batch, self.settings.algorithm.correction)
        if rejection_metrics(batch).get("rejected_share") == 1.0:
            self.session.display.notice("warning: the correction rejects every token; this step teaches nothing")
        return batch

    def begun(self, batch: Samples) -> Samples:
        """A batch that is about to be judged."""
        return batch

    def with_logprobs(self, batch: Samples) -> Samples:
        """The log-probs of the policy that the updates start from, where they need them, and those of the reference."""
        # A file need not say what the sampler thought; then the samples are taken to be the present policy's.
        needs_old = computes_old_logprobs(self.settings) or "sampler_logprob" not in batch.tokens
        if needs_old or self.roles.reference is not None:
            with self.session.clock.phase("log_prob"):
                self.enter(Phase.LOGPROB)
        if needs_old:
            batch = self.with_old_logprobs(batch)
        return batch if self.roles.reference is None else self.with_reference_logprobs(batch)

    def with_old_logprobs(self, batch: Samples) -> Samples:
        """What the actor says of each token before the step's first update."""
        with self.session.clock.phase("log_prob"):
            self.await_compiler()
            old = self.roles.actor.forward(batch, temperature=self.settings.rollout.sampling.temperature)[0]
            return batch.with_tokens(old_logprob=old, sampler_logprob=batch.tokens.get("sampler_logprob", old))

    def with_reference_logprobs(self, batch: Samples) -> Samples:
        """What the policy says that the divergence is measured from."""
        with self.session.clock.phase("reference"):
            self.refresh_reference()
            self.await_compiler()
            temperature = self.settings.rollout.sampling.temperature
            return batch.with_tokens(reference_logprob=self.roles.reference.logprobs(batch, temperature=temperature))

    def refresh_reference(self) -> None:
        """Let the reference take the actor's weights, if that is due after the step before this one."""
        every = self.settings.reference.refresh_every_steps
        if not refreshes(self.settings) or not self.step or self.step % every:
            return
        self.residents.enter(Phase.LOGPROB, step=self.step + 1, why="refresh")
        self.roles.reference.refresh(self.roles.actor, self.version)
        self.residents.changed("reference")
        self.reference_version = self.version

    def with_values(self, batch: Samples) -> Samples:
        """What the critic expected at each token, where there is one."""
        critic = self.roles.critic
        if critic is None:
            return batch
        with self.session.clock.phase("values"):
            self.enter(Phase.VALUES)
            self.await_compiler()
            check_read(batch, self.critic_rows)
            return batch.with_tokens(values=critic.forward(batch)[0])

    def with_advantages(self, batch: Samples) -> Samples:
        """How much better each token did than expected, once the divergence that the rewards pay for is taken off."""
        kl_T = reward_divergence(batch, self.settings.algorithm)
        batch = with_advantages(batch, self.settings.algorithm, kl_T, self.kl_weight.coefficient)
        if kl_T is not None:
            self.kl_weight.adapt(kl_T, batch, follows=not self.is_warming_up)
        return batch

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
                loss = PolicyObjective.of(update, self.settings.algorithm, version)
                temperature = self.settings.rollout.sampling.temperature
                report = self.roles.actor.forward_backward(loss.read(update), loss, temperature=temperature)
                if not lesson.steps:
                    check_sampler_gap(report, self.settings.algorithm.max_sampler_gap)
                lesson.updates.append(report)
                lesson.steps.append(self.roles.actor.optim_step(self.total_updates))
        return lesson

    def value_updates(self, updates: Sequence[Samples]) -> ValueLesson:
        """The critic's updates of a step: as many as the actor has, or would have but for the warm-up."""
        lesson = learn_values(self.roles.critic, updates, self.settings, self.critic_updates)
        self.critic_updates_done += len(lesson.steps)
        return lesson

    def updates(self, batch: Samples) -> list[Samples]:
        """What is learned of the batch, once for each epoch. Prompts without a valid sample teach nothing."""
        taught = [piece for piece in self.pieces(batch) if bool(piece["mask"].any())]
        return taught * self.settings.batch.epochs_per_step

    def pieces(self, batch: Samples) -> list[Samples]:
        """The batch cut by prompts, one piece for each update of an epoch."""
        size = self.settings.batch.prompts_per_update or self.settings.batch.prompts_per_step
        place = torch.unique_consecutive(batch["group"], return_inverse=True)[1]
        count = int(place.max()) // size + 1
        return [learned(batch.select((place // size == i).nonzero().squeeze(-1))) for i in range(count)]

    def sync(self, version: int) -> None:
        """The engine gets the weights."""
        self.version = version
        with self.session.clock.phase("sync"):
            self.enter(Phase.SYNC)
            self.roles.engine.load_weights(version)
            self.roles.engine.wake()
