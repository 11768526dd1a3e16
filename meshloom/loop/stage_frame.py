"""The frame of a reinforcement-learning stage: what it keeps beside the algorithm.

Owns: what users are told of a step, validation, what a checkpoint holds of the algorithm and of the models. Refuses to know:
what is learned and how (``loop.rl``), devices, files. Always holds: a stage that is loaded stands where it was saved.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from meshloom.algorithms.own import digests
from meshloom.config.reward_settings import component_names, reward_models, solving_component
from meshloom.config.settings import TrainSettings
from meshloom.loop.baseline import baseline_metrics
from meshloom.loop.collect import sample_records
from meshloom.loop.component_watch import ComponentWatch, component_metrics
from meshloom.loop.correction import rejection_metrics
from meshloom.loop.frozen_weights import frozen_digests
from meshloom.loop.groups import cut_of
from meshloom.loop.invalid_rewards import InvalidWatch, check_rewards, refuse_invalid
from meshloom.loop.kl_control import KlWeight
from meshloom.loop.model_verbs import Model, ReferencePolicy
from meshloom.loop.printed import PrintedWatch
from meshloom.loop.reference_role import WithReference
from meshloom.loop.residents import Residents
from meshloom.loop.roles import Lesson, Roles
from meshloom.loop.session import Cut, Session, Snapshot
from meshloom.loop.spread import ShortWatch, sifted_metrics
from meshloom.loop.stage import Draw, Group, Job, Progress, StepDone
from meshloom.loop.step_metrics import SpreadWatch, batch_metrics, progress_metrics, speed_metrics
from meshloom.loop.value_objective import value_metrics
from meshloom.plan.reference import refreshes
from meshloom.plan.residency import Phase
from meshloom.samples import Samples, concat
from meshloom.samples.episodes import joined
from meshloom.train.snapshot import ModelSnapshot, ModelSnapshots


@dataclass
class StageFrame:
    """The roles of a run, and what is kept and told of them.

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
    roles: Roles[Model, ReferencePolicy]
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
        self.invalid = InvalidWatch(self.session.display.notice)
        self.printed = PrintedWatch(self.session.display.notice)
        self.short = ShortWatch(self.settings, self.session.display.notice)
        self.kl_weight = KlWeight.of(self.settings.algorithm)
        self.own, self.frozen = digests(self.settings.algorithm), frozen_digests(self.settings)
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

    def look(self, batch: Samples) -> None:
        """Tell of rewards that teach nothing.

        Raises:
            RunFault: if too many of them are invalid.
        """
        self.components.look(batch)
        scored, self.scored = self.scored or [batch], []
        check_rewards(judged := concat(scored), self.settings)
        self.invalid.look(joined(judged).meta["invalid"])
        self.spread.look(batch)

    def report(self, done: StepDone[Samples, Lesson]) -> None:
        """Write what the step was."""
        self.step = done.step
        if done.sifted is not None:
            self.short.look(done.step, done.sifted)
        self.session.log("train", self._metrics(done), step=done.step)
        batch, count = done.batch, self.settings.logging.samples_per_step
        shown = batch if count is None else batch.select(range(min(count, len(batch))))
        self.log_samples(shown, done.step, exact=self.settings.logging.sampler_logprobs)

    def log_samples(self, shown: Samples, step: int, *, exact: bool) -> None:
        """Write samples of a step; arguments as of ``sample_records``."""
        prompts = self.roles.collector.prompts
        self.session.log_samples(lambda: sample_records(shown, prompts, step=step, kind="train", exact=exact))
        self.printed.look(shown.meta.get("printed", ()))

    def _metrics(self, done: StepDone[Samples, Lesson]) -> dict[str, float]:
        """Numbers of a step: what was sampled, what was learned, where the run is, how fast it was."""
        batch, settings = done.batch, self.settings
        metrics = self.rollout_metrics(batch) | done.learned.metrics()
        metrics |= value_metrics(batch) | done.learned.critic.metrics()
        metrics |= progress_metrics(done) | rejection_metrics(batch) | self.kl_weight.metrics()
        if settings.algorithm.max_lag_versions or done.sifted is not None:
            metrics["lag_versions"] = done.lag
        if refreshes(settings):
            metrics["reference_version"] = self.reference_version or 0
        if done.sifted is not None:
            metrics |= sifted_metrics(done.sifted)
        return metrics | speed_metrics(batch, self.session.clock, self.roles.actor)

    def rollout_metrics(self, batch: Samples) -> dict[str, float]:
        """What the samples of a step are, and what their rewards took."""
        validation = self.settings.validation
        solving = solving_component(self.settings.reward, validation.success_component)
        metrics = batch_metrics(batch, threshold=validation.success_threshold, component=solving)
        metrics |= component_metrics(batch, self.components.names) | self.roles.collector.scorer.take_counts()
        return metrics | baseline_metrics(batch) | self.roles.engine.take_prompts().metrics()

    def validate(self, step: int) -> float | None:
        """The accuracy on held-out prompts, if there are any."""
        if self.roles.validator is None:
            return None
        with self.session.clock.phase("validate"):
            self.residents.enter(Phase.GENERATE, step=step, why="validate")
            found = self.roles.validator.run(step, self.session.clock)
        self.session.log("validation", found.metrics, step=step)
        self.session.log_samples(lambda: found.records)
        self.printed.look(record.get("printed", "") for record in found.records)
        if step == 0:  # nothing is learned yet: what fails here would fail in each step
            refuse_invalid(found.invalid, self.settings, "the first validation")
        self.invalid.look(found.invalid)
        return found.metrics.get("accuracy")

    def save(self, progress: Progress, waiting: Sequence[Group[Samples]], score: float | None) -> None:
        """A checkpoint: the model, where the run stands, and the groups that wait."""
        with self.session.clock.phase("save"):
            self.residents.enter(Phase.UPDATE, step=progress.step, why="save")
            cut = cut_of(progress, waiting, self.state())
            self.session.save(self.snapshot, cut, step=progress.step, score=score)

    def state(self) -> dict[str, Any]:
        """What of the algorithm a checkpoint holds beside the model: JSON values."""
        state = {"kl_coefficient": self.kl_weight.coefficient, "own": self.own, "frozen": self.frozen}
        return {**state, "critic_updates": self.critic_updates_done, "reference_version": self.reference_version}

    def load(self, cut: Cut) -> None:
        """Stand where a run was saved."""
        self.step = cut.values["step"]
        self.version = cut.values["version"]
        kept = cut.values["algorithm"]
        self.kl_weight.coefficient, self.critic_updates_done = kept["kl_coefficient"], kept["critic_updates"]
        self.reference_version = kept["reference_version"]
        changed = [f"the file of algorithm.{name}" for name in _changed(kept["own"], self.own)]
        changed += [f"the weights of {setting}" for setting in _changed(kept["frozen"], self.frozen)]
        for what in changed:
            text = f"warning: {what} changed since the checkpoint: this run does not repeat itself"
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


def _changed(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Names whose digest is another one than it was."""
    return [name for name, digest in before.items() if now.get(name) != digest]
