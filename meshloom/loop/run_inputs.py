"""What a reinforcement-learning run is given: settings, prompts, samples of a file, a checkpoint to go on from.

Owns: reading all of it, and where the run stands in it. Refuses to know: devices, models. Always holds: whatever can be wrong
with it is found here, before a weight is read or the run folder is touched.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from meshloom.algorithms.own_checks import check_own
from meshloom.config.settings import TrainSettings
from meshloom.data.order import PromptOrder
from meshloom.data.rows import Prompt, RowNames
from meshloom.data.tokenizer import load_tokenizer, require_tokens
from meshloom.loop.build import find_checkpoint, finish_plan, load_prompts, texts_decoder
from meshloom.loop.critic_role import critic_model_settings
from meshloom.loop.environments import RunPrompts, run_prompts, unseen_tools
from meshloom.loop.saved_samples import SavedSamples, read_saved
from meshloom.loop.session import Cut, read_cut
from meshloom.observe.loggers import check_loggers
from meshloom.observe.run_folder import check_free
from meshloom.plan.build import Plan
from meshloom.plan.placement import has_critic
from meshloom.train.load import check_model_folder


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """What a run is given.

    Args:
        settings: with what a checkpoint or a file of samples decides.
        checkpoint: that the run goes on from.
        cut: what it holds beside the models.
        tokenizer: of the model.
        rendered: how rows become prompts.
        prompts: that are trained on.
        held_out: prompts of the validation.
        num_dropped: prompts that were too long.
        names: of all rows; those of the settings also where samples come from a file.
        saved: samples of a file, in place of those that would be generated.
        order: of the prompts, where the run stands.
    """

    settings: TrainSettings
    checkpoint: Path | None
    cut: Cut | None
    tokenizer: PreTrainedTokenizerBase
    rendered: RunPrompts
    prompts: list[Prompt]
    held_out: list[Prompt]
    num_dropped: int
    names: RowNames
    saved: SavedSamples | None
    order: PromptOrder

    @classmethod
    def read(cls, settings: TrainSettings, *, resume: bool) -> "RunInputs":
        """Read everything.

        Args:
            settings: of the run.
            resume: go on from the newest checkpoint.

        Raises:
            UserError: if something of it is bad.
        """
        checkpoint, settings = find_checkpoint(settings) if resume else (None, settings)
        cut = None if checkpoint is None else read_cut(checkpoint)
        tokenizer = load_tokenizer(settings.model.path)
        rendered = run_prompts(settings, tokenizer)
        prompts, held_out, num_dropped = load_prompts(settings, rendered)
        names = RowNames.of(prompt.row for prompt in (*prompts, *held_out))
        saved = read_saved(settings, texts_decoder(tokenizer))
        if saved is not None:
            prompts, settings = saved.prompts, saved.with_steps(settings)
        order = PromptOrder(len(prompts), settings.seed, settings.data.shuffle)
        if cut is not None:
            order.load(cut.values["order"])
        return cls(
            settings=settings,
            checkpoint=checkpoint,
            cut=cut,
            tokenizer=tokenizer,
            rendered=rendered,
            prompts=prompts,
            held_out=held_out,
            num_dropped=num_dropped,
            names=names,
            saved=saved,
            order=order,
        )

    def planned(self, device_memory: int | None) -> "tuple[Plan, RunInputs]":
        """The plan, and the same with what it decided. Arguments and errors as of ``finish_plan``."""
        plan, settings = finish_plan(self.settings, len(self.prompts), device_memory)
        return plan, replace(self, settings=settings)

    @property
    def updates(self) -> int:
        """Of the actor, made before."""
        return 0 if self.cut is None else int(self.cut.values["version"])

    @property
    def critic_updates(self) -> int:
        """Of the critic, made before."""
        return 0 if self.cut is None else int(self.cut.values["algorithm"]["critic_updates"])

    def require_tokens(self, rows: int, setting: str = "model.path") -> None:
        """Check that a model of so many tokens, which a setting names, has every token of the run.

        Raises:
            UserError: if it does not.
        """
        ids: list[Sequence[int]] = [prompt.ids for prompt in (*self.prompts, *self.held_out)]
        require_tokens(rows, ids if self.saved is None else [*ids, *self.saved.ids()], setting)

    def notices(self) -> Iterator[str]:
        """What the user is told of it when the run begins."""
        if self.num_dropped:
            yield f"{self.num_dropped} prompts longer than data.max_prompt_tokens were dropped"
        yield from filter(None, (unseen_tools(self.rendered), self.rendered.remark))


def check_places(settings: TrainSettings, *, resume: bool) -> None:
    """Look whether what the settings name is there, and the run folder is free; takes no time.

    Raises:
        UserError: that names the first that is not.
    """
    check_model_folder(settings.model.path)
    if has_critic(settings):
        check_model_folder(critic_model_settings(settings).path, "critic.model")
    if settings.reference.model is not None:
        check_model_folder(settings.reference.model)
    check_free(settings.run_dir, resume=resume)
    check_loggers(settings.logging.loggers)
    check_own(settings.algorithm)
