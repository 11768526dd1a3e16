"""Training on samples of a file, and generating samples without training.

Owns: the job that hands out a file's groups, the schedule of such a run, the program of ``meshloom rollout``. Refuses to know:
how a file is read (``loop.saved_samples``). Always holds: a run on the samples that another run trained on, with the same
settings and a lag of 0, makes the same weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshloom.config.settings import TrainSettings
from meshloom.data.order import PromptOrder
from meshloom.loop.control import Schedule, nothing_finished, tried_twice
from meshloom.loop.groups import group_of
from meshloom.loop.rl import RLStage
from meshloom.loop.saved_samples import SavedSamples
from meshloom.loop.stage import Attempt, Collected, Draw, Group
from meshloom.samples import Samples, concat


@dataclass(frozen=True)
class SavedJob:
    """Groups of a file, as a rollout that is done.

    Args:
        saved: the file.
        draws: that they stand for.
        settings: of the run.
    """

    saved: SavedSamples
    draws: Sequence[Draw]
    settings: TrainSettings

    def collect(self) -> Attempt[Group[Samples]]:
        """The groups of the step that these draws are for; a step of the file may have fewer."""
        step = self.draws[0].number // self.settings.batch.prompts_per_step
        pairs = zip(self.draws, self.saved.steps[step], strict=False)
        return Attempt({draw.number: group_of(draw.number, group, self.settings) for draw, group in pairs})


def saved_jobs(
    saved: SavedSamples, settings: TrainSettings, notice: Callable[[str], None]
) -> Callable[[Sequence[Draw]], SavedJob]:
    """What begins a rollout where samples come from a file.

    Args:
        saved: the file.
        settings: of the run.
        notice: called with a sentence for the user.
    """
    if not saved.has_logprobs:
        notice(
            f"{saved.file} has no log-probs of the sampler: its samples are trained on as if the present weights had "
            "sampled them, and the sampler's gap is not measured"
        )
    return lambda draws: SavedJob(saved, draws, settings)


def schedule_of(settings: TrainSettings, steps: int) -> Schedule:
    """The schedule of a run. What comes from a file is there: nothing runs ahead, is too old, or is replaced."""
    schedule = Schedule.of(settings, steps)
    return schedule if settings.rollout.from_samples is None else replace(schedule, max_lag_versions=0, sieve=None)


def dump_samples(stage: RLStage, order: PromptOrder, steps: int) -> bool:
    """Generate and score the prompts of so many steps, with the weights as they are; whether the last was reached.

    The draws of a step are those of a run that trains with a lag of 0, so its first step has the same samples.

    Raises:
        RunFault: as training: if no group of a step was finished, or too many rewards are invalid.
    """
    prompts = stage.settings.batch.prompts_per_step
    for step in range(1, steps + 1):
        if stage.stop_wanted:
            return False
        draws = [Draw((step - 1) * prompts + i, prompt) for i, prompt in enumerate(order.take(prompts))]
        found = tried_twice(
            draws, stage.begin_rollout(draws, 0).collect(), lambda again: stage.begin_rollout(again, 0).collect()
        )
        if not found.groups:
            raise nothing_finished(len(found.dropped), stage.settings.rollout.deadline_s)
        _write(stage, found, step)
    return True


def _write(stage: RLStage, found: Collected[Group[Samples]], step: int) -> None:
    """Look at the samples of a step, and write them."""
    batch = concat([group.content for group in found.groups])
    stage.look(batch)
    stage.step = step
    counts = {"prompts_retried": found.retried, "prompts_dropped": len(found.dropped)}
    stage.session.log("train", stage.rollout_metrics(batch) | counts, step=step)
    stage.log_samples(batch, step, exact=True)
