"""What settings of the reference mean together.

Owns: rules about it. Refuses to know: devices, how weights are copied.

Codes: A034 settings of a reference that nothing uses, A035 a reference that is to be refreshed while adapters are trained, A036
a reference of another architecture, A037 a reference that is refreshed over stages of layers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshloom.config.errors import UserError
from meshloom.config.settings import KlPlace, TrainSettings
from meshloom.plan.checks import Findings
from meshloom.plan.ledger import DERIVED, LedgerLine
from meshloom.plan.model_folder import read_model_folder
from meshloom.plan.reference import has_own_reference, refreshes

_MODEL, _EVERY = "reference.model", "reference.refresh_every_steps"
_SHAPES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)


def check_reference(found: Findings, settings: TrainSettings) -> None:
    """Refuse a reference that cannot be used so; warn of settings that nothing uses."""
    reference = settings.reference
    if settings.algorithm.kl is KlPlace.NONE:
        for path, is_given in ((_MODEL, reference.model is not None), (_EVERY, reference.refresh_every_steps > 0)):
            if is_given:
                what = f"{path} is not used, as algorithm.kl is none"
                found.warn("A034", path, what, fix="set algorithm.kl=loss or algorithm.kl=reward")
        return
    if reference.refresh_every_steps and settings.model.lora is not None:
        found.refuse(
            "A035",
            _EVERY,
            "a reference is refreshed with all weights of the actor, and only adapters are trained",
            why="the base under the adapters stays as it is",
            fix=f"{_EVERY}=0, or model.lora=null",
            suggestions=((f"{_EVERY}=0",), ("model.lora=null",)),
        )
    if refreshes(settings) and max(settings.parallel.actor.pipeline, settings.parallel.reference.pipeline) > 1:
        what = "a reference that is refreshed cannot be cut into stages of layers, nor the actor"
        found.refuse(
            "A037", _EVERY, what, fix="parallel.actor.pipeline=1 and parallel.reference.pipeline=1, or no refresh"
        )
    if reference.model is not None:
        _check_folder(found, settings, Path(reference.model))


def _check_folder(found: Findings, settings: TrainSettings, folder: Path) -> None:
    """The reference's folder beside the model's: ids and the ledgers of both are the same."""
    try:
        own = _shapes(read_model_folder(folder).config)
    except UserError as error:
        found.refuse("A036", _MODEL, f"the reference cannot be read: {error.what}", why=error.why, fix=error.fix)
        return
    try:
        trained = _shapes(read_model_folder(Path(settings.model.path)).config)
    except UserError:
        return  # it is told by its own code
    if differing := [name for name in _SHAPES if own[name] != trained[name]]:
        lines = ", ".join(f"{name} {own[name]}, not {trained[name]}" for name in differing[:3])
        found.refuse(
            "A036",
            _MODEL,
            f"{folder} is of another architecture than {settings.model.path}",
            why=f"{lines}; the reference scores the same tokens, and the plan counts it like the model",
            fix="a folder of the same architecture, or leave it out",
        )


def _shapes(config: Mapping[str, Any]) -> dict[str, Any]:
    text = config.get("text_config", config)
    return {name: config.get(name, text.get(name)) for name in _SHAPES}


def reference_line(settings: TrainSettings) -> LedgerLine | None:
    """What the reference is, for the batch ledger; none where there is none."""
    every = settings.reference.refresh_every_steps
    if settings.algorithm.kl is KlPlace.NONE:
        return None
    if not has_own_reference(settings):
        value, formula = "base under the adapters", "no second model"
    else:
        value = settings.reference.model or settings.model.path
        formula = f"takes the actor's weights every {every} steps" if every else "frozen"
    return LedgerLine(section="batch", name="reference", value=value, formula=formula, source=DERIVED)
