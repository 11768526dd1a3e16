"""What settings of a critic mean together with the rest, and with its model's folder.

Owns: the rules. Refuses to know: devices, tensors. Always holds: what the actor may sample, the critic can read; a setting of
a critic that the run does not have is told.

Codes: Q.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshloom.config.critic_settings import CriticSettings
from meshloom.config.errors import UserError
from meshloom.config.names import VALUE_ADVANTAGES
from meshloom.config.settings import TrainSettings
from meshloom.plan.decoder_numbers import DecoderNumbers
from meshloom.plan.ledger import longest_sample_tokens, train_steps
from meshloom.plan.model_folder import ModelFolder, read_model_folder
from meshloom.plan.parameters import UnknownFamily, count_parameters
from meshloom.plan.placement import has_critic
from meshloom.plan.scalar_head import has_scalar_head

if TYPE_CHECKING:
    from meshloom.plan.findings import Findings

MODEL = "critic.model"


def check_critic(found: "Findings", settings: TrainSettings, num_prompts: int | None) -> None:
    """Rules that need no model.

    Args:
        found: takes refusals and warnings.
        settings: of the run.
        num_prompts: prompts of the training data; none if not known.
    """
    critic, advantage = settings.critic, settings.algorithm.advantage
    if not has_critic(settings):
        for name in CriticSettings.model_fields:
            if getattr(critic, name) != CriticSettings.model_fields[name].default:
                what = f"critic.{name} is not used, as algorithm.advantage={advantage} asks no critic for values"
                names = " or ".join(sorted(VALUE_ADVANTAGES))
                found.warn("Q001", f"critic.{name}", what, fix=f"set algorithm.advantage={names}, or leave it out")
        return
    _check_bound(found, settings)
    steps = train_steps(settings, num_prompts)
    if steps is not None and critic.warmup_steps >= steps:
        what = (
            f"the critic learns alone for {critic.warmup_steps} steps, the run has {steps}: the actor is never updated"
        )
        fix = f"critic.warmup_steps={steps - 1} or less, or train longer"
        found.warn("Q003", "critic.warmup_steps", what, fix=fix)
    optimizer, path = critic.optimizer, "critic.optimizer"
    if optimizer.lr == 0:
        found.warn("Q004", f"{path}.lr", "the critic's learning rate is 0: its values stay what they are")
    if optimizer.schedule == "constant" and optimizer.min_lr_ratio != 0:
        found.warn("Q005", f"{path}.min_lr_ratio", "min_lr_ratio is not used by the constant schedule")


def _check_bound(found: "Findings", settings: TrainSettings) -> None:
    """The longest sample must fit the critic's own microbatch."""
    path, parts = "critic.tokens_per_microbatch", settings.parallel.critic.sequence
    each, longest = settings.critic.tokens_per_microbatch, longest_sample_tokens(settings)
    if each is None or each * parts >= longest:
        return
    least = -(-longest // parts)
    what = f"a sample may have {longest} tokens, a microbatch of the critic holds {each * parts}"
    fixes = (f"{path}={least}", f"{path}=null")
    found.refuse("Q002", path, what, fix=", or ".join(fixes), suggestions=tuple((fix,) for fix in fixes))


def critic_folder(found: "Findings", settings: TrainSettings, actor: ModelFolder | None) -> ModelFolder | None:
    """The folder of a run's critic, read and checked; none where there is no critic, or the folder cannot be used.

    Args:
        found: takes refusals.
        settings: of the run.
        actor: its model's folder; none if that cannot be read.
    """
    if not has_critic(settings):
        return None
    if settings.critic.model is None:
        return actor
    try:
        folder = read_model_folder(Path(settings.critic.model), needs_weights=False, setting=MODEL)
        has_scalar_head(folder)
    except UserError as error:
        found.refuse("Q006", MODEL, error.what, why=error.why, fix=error.fix)
        return None
    if actor is not None:
        _check_vocabulary(found, folder, actor)
    return folder


def critic_numbers(settings: TrainSettings) -> DecoderNumbers | None:
    """The critic's model in numbers, as a language model; none where it is the actor's, or cannot be counted."""
    if not has_critic(settings) or settings.critic.model is None:
        return None
    try:
        return count_parameters(read_model_folder(Path(settings.critic.model), needs_weights=False).config)
    except (UserError, UnknownFamily):
        return None


def _check_vocabulary(found: "Findings", critic: ModelFolder, actor: ModelFolder) -> None:
    has, actors = _rows(critic), _rows(actor)
    if has is None or actors is None or has >= actors:
        return
    needed = _tokens(actor.path) or actors
    if has < needed:
        what = f"the critic knows {has} tokens, the actor's tokenizer has {needed}"
        fix = "a critic of the actor's family, or leave it out: the critic then begins as the actor does"
        found.refuse("Q007", MODEL, what, why="it reads what the actor writes, token by token", fix=fix)


def _rows(folder: ModelFolder) -> int | None:
    rows = folder.text_config.get("vocab_size")
    return rows if isinstance(rows, int) else None


def _tokens(folder: Path) -> int | None:
    """Tokens of a folder's tokenizer, the highest id and one; none if that cannot be read."""
    try:
        table: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary, added = table["model"]["vocab"], table.get("added_tokens") or ()
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return max((*ids, *(int(token["id"]) for token in added)), default=-1) + 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
