"""Environments of a run: opening them, and the prompts of their rows.

Owns: what is checked of an environment at the start, and which rewards an episode has. Refuses to know: how episodes go. Always
holds: a template that cannot go on after a turn, a tool without a schema and an environment that cannot be loaded are refused
before the run folder is touched.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from meshloom.config.episode_settings import EnvironmentSettings, RewrittenHistory
from meshloom.config.errors import UserError
from meshloom.config.problems import require_none
from meshloom.config.settings import DataSettings, EvalSettings, SourceSettings, TrainSettings
from meshloom.data.prompts import RenderedPrompts, end_of_turn, render_prompts
from meshloom.data.rows import Prompt, Row, RowNames
from meshloom.data.sources import load_rows
from meshloom.environments.chat import ChatRenderer
from meshloom.environments.pool import EnvironmentPool, tool_schemas
from meshloom.environments.template_checks import check_template
from meshloom.loop.collect import Collector
from meshloom.loop.episodes import Environments, EpisodeCollector
from meshloom.loop.reward_models import Models
from meshloom.loop.rewarding import open_rewards
from meshloom.plan.environment_checks import check_environment_files
from meshloom.plan.findings import Findings
from meshloom.rewards.combined import Combination, Scorer


@dataclass(frozen=True)
class RunPrompts:
    """Rows as prompts, for a run with an environment or without.

    Args:
        settings: of the environment; none: prompts are answered in one turn.
        data: settings of the prompts.
        tokenizer: of the model.
        renderer: of conversations; none without an environment.
        remark: what a user should know of the chat template; empty if nothing is known.
    """

    settings: EnvironmentSettings | None
    data: DataSettings
    tokenizer: PreTrainedTokenizerBase
    renderer: ChatRenderer | None
    remark: str = ""

    def load(self, source: SourceSettings) -> RenderedPrompts:
        """Prompts of a source, as ``render`` makes them.

        Raises:
            UserError: as ``load_rows`` and ``render_prompts``.
        """
        return self.render(load_rows(source, self.data))

    def render(self, rows: Sequence[Row]) -> RenderedPrompts:
        """Prompts of rows, and how many were too long and dropped. Where an environment makes them when it is reset, the ids
        are those of an empty message.

        Raises:
            UserError: as ``render_prompts``.
        """
        if self.settings is None or self.renderer is None:
            return render_prompts(rows, self.tokenizer, self.data)
        if self.settings.gym or self.settings.custom:
            ids = self.renderer.begin([{"role": "user", "content": ""}]).ids
            return RenderedPrompts(prompts=[Prompt(row=row, ids=ids, text=_shown(row)) for row in rows], dropped=0)
        return render_prompts(rows, self.tokenizer, self.data, self.renderer.tools)


def _shown(row: Row) -> str:
    return row.prompt if isinstance(row.prompt, str) else str(row.prompt[-1].get("content", ""))


def run_prompts(settings: TrainSettings | EvalSettings, tokenizer: PreTrainedTokenizerBase) -> RunPrompts:
    """How rows of a run become prompts.

    Raises:
        UserError: if a file lacks what is named, a tool has no schema, or the chat template cannot go on after a turn.
    """
    renderer = _renderer(settings, tokenizer)
    remark = template_remark(settings, renderer)
    return RunPrompts(settings.environment, settings.data, tokenizer, renderer, remark)


def _renderer(settings: TrainSettings | EvalSettings, tokenizer: PreTrainedTokenizerBase) -> ChatRenderer | None:
    environment = settings.environment
    if environment is None:
        return None
    found = Findings(settings)
    check_environment_files(found, environment)
    require_none(found.problems, "environment")
    end = end_of_turn(tokenizer, settings.data)
    if not tokenizer.chat_template or end is None:
        raise UserError(
            "an environment needs a chat template",
            where="environment",
            why="the tokenizer has none" if end is not None else "the tokenizer has no end token",
            fix="put chat_template.jinja into the model folder",
        )
    return ChatRenderer(tokenizer, end, tool_schemas(environment), settings.data.chat_template_arguments)


def template_remark(settings: TrainSettings | EvalSettings, renderer: ChatRenderer | None) -> str:
    """Check that the chat template can go on after a turn, where there are several; what to tell of it, or nothing.

    Raises:
        UserError: if it cannot.
    """
    environment = settings.environment
    if environment is None or renderer is None or environment.reasoning_gym or environment.max_turns == 1:
        return ""
    return check_template(
        renderer,
        "tool" if environment.tools else "user",
        system_prompt=settings.data.system_prompt,
        splits=environment.rewritten_history is RewrittenHistory.SPLIT,
    )


def open_environments(
    resources: ExitStack, settings: TrainSettings | EvalSettings, prompts: RunPrompts
) -> Environments | None:
    """The processes of a run's environments; none if prompts are answered in one turn.

    Args:
        resources: that close them.
        settings: of the run.
        prompts: of the run.

    Raises:
        UserError: if the environment cannot be loaded.
    """
    if settings.environment is None or prompts.renderer is None:
        return None
    return Environments(
        settings=settings.environment,
        pool=resources.enter_context(EnvironmentPool(settings.environment)),
        renderer=prompts.renderer,
        system_prompt=settings.data.system_prompt,
        max_prompt_tokens=settings.data.max_prompt_tokens,
        judge_alone=_judge_alone(settings),
    )


def _judge_alone(settings: TrainSettings | EvalSettings) -> bool:
    """Whether episodes have no reward but their environment's."""
    environment, reward = settings.environment, settings.reward
    return environment is not None and environment.gives_rewards and not (reward.function or reward.components)


def open_scorer(
    resources: ExitStack,
    settings: TrainSettings | EvalSettings,
    names: RowNames,
    tokenizer: PreTrainedTokenizerBase,
    models: Models | None,
) -> Scorer:
    """What scores the samples of a run. Where an environment gives rewards and no other is set, that is nothing.

    Args:
        resources: that end it.
        settings: of the run.
        names: of the rows: where they are from, for the default function, and their columns.
        tokenizer: of the model that samples.
        models: where reward models are asked; none where there are none.

    Raises:
        UserError: if a reward cannot be made.
    """
    if _judge_alone(settings):
        return Combination(())
    return resources.enter_context(open_rewards(settings, names, tokenizer, models))


def unseen_tools(prompts: RunPrompts) -> str:
    """What to tell a user whose chat template does not show the tools; empty if it does."""
    if prompts.renderer is None or prompts.renderer.shows_tools():
        return ""
    return (
        "warning: the chat template does not show the tools; the model must know them, or be told in data.system_prompt"
    )


def collector_of(environments: Environments | None, **parts: Any) -> Collector:
    """What makes groups: of episodes, where there are environments.

    Args:
        environments: of the run.
        parts: of a ``Collector``.
    """
    return Collector(**parts) if environments is None else EpisodeCollector(environments=environments, **parts)
