"""What samples meet outside of the models: environments, and what scores them.

Owns: opening both for a run. Refuses to know: how either works, who samples. Always holds: what separates a model's programs
from this machine is found before the first of them could run.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from meshloom.config.settings import EvalSettings, TrainSettings
from meshloom.data.rows import RowNames
from meshloom.loop.environments import RunPrompts, open_environments, open_scorer
from meshloom.loop.episodes import Environments
from meshloom.loop.isolation import check_isolation, tell_isolation
from meshloom.loop.reward_models import Models
from meshloom.rewards.combined import Scorer
from meshloom.rewards.isolation import Found


@dataclass(frozen=True)
class Surroundings:
    """What samples meet.

    Args:
        scorer: of samples.
        environments: of episodes; none where prompts are answered in one turn.
        isolation: what separates programs from this machine; none where none run.
    """

    scorer: Scorer
    environments: Environments | None
    isolation: Found | None

    def tell(self, notice: Callable[[str], None], folder: Path) -> None:
        """Say what separates programs from this machine: to the user, and in the run folder."""
        tell_isolation(self.isolation, notice, folder)


def open_surroundings(
    resources: ExitStack,
    settings: TrainSettings | EvalSettings,
    rendered: RunPrompts,
    names: RowNames,
    tokenizer: PreTrainedTokenizerBase,
    models: Models | None,
) -> Surroundings:
    """Open what samples of a run meet.

    Args:
        resources: that close it.
        settings: of the run.
        rendered: its prompts.
        names: of the rows: where they are from, for the default function, and their columns.
        tokenizer: of the model that samples.
        models: where reward models are asked; none where there are none.

    Raises:
        UserError: if a reward cannot be made, an environment cannot be loaded, or programs would run without what is demanded.
    """
    isolation = check_isolation(settings.reward)
    scorer = open_scorer(resources, settings, names, tokenizer, models)
    return Surroundings(scorer, open_environments(resources, settings, rendered), isolation)
