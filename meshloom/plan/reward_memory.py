"""What reward models hold on a device.

Owns: bytes of their weights and of a batch, and what of an engine is still there while they compute. Refuses to know: which
devices they are on. Always holds: weights are counted from the model's files; a number that is an estimate says so.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from meshloom.config.errors import UserError
from meshloom.config.reward_settings import RewardModelSettings, reward_models
from meshloom.config.settings import TrainSettings
from meshloom.plan.ledger import longest_sample_tokens
from meshloom.plan.memory import compute_bytes
from meshloom.plan.model_folder import ModelFolder
from meshloom.plan.placement import Role
from meshloom.plan.residency import EVERY, Holding, Phase
from meshloom.plan.reward_checks import read_reward_folder
from meshloom.plan.role_numbers import PLACES
from meshloom.plan.sharded_memory import DeviceLedger

_KEPT = ("key-value cache", "engine's weights")


def reward_holdings(settings: TrainSettings) -> tuple[Holding, ...]:
    """All reward models of a run, on each of their devices; of a folder that cannot be read nothing is counted."""
    found = []
    for name, model in reward_models(settings.reward).items():
        folder = reward_folder(model.path)
        if folder is not None:
            found += _holdings(settings, name, model, folder)
    return tuple(found)


def reward_folder(path: str) -> ModelFolder | None:
    """A reward model's folder; none if it cannot be read."""
    return _folder(path, _changed(path))


def _changed(path: str) -> float:
    """When the folder's config.json was last written; 0 if there is none."""
    file = Path(path) / "config.json"
    return file.stat().st_mtime if file.is_file() else 0.0


@lru_cache(maxsize=16)
def _folder(path: str, changed: float) -> ModelFolder | None:
    """The folder, read once for all arrangements that are tried."""
    try:
        return read_reward_folder(path, "")
    except UserError:
        return None


def _holdings(settings: TrainSettings, name: str, model: RewardModelSettings, folder: ModelFolder) -> Iterator[Holding]:
    width, place = compute_bytes(model.dtype, settings.device), PLACES[settings.offload.reward.parameters]
    weights = folder.num_parameters * width
    phases = EVERY if place is PLACES["none"] else (Phase.SCORE,)
    formula = f"parameters of the files × {width}"
    yield Holding(
        role=str(Role.REWARD), name=f"weights of {name}", bytes=weights, phases=phases, formula=formula, at=place
    )
    values = _values_of_a_layer(folder.text_config)
    longest = min(longest_sample_tokens(settings), model.tokens_per_batch)
    yield Holding(
        role=str(Role.REWARD),
        name=f"activations of {name}",
        bytes=model.tokens_per_batch * (values + longest) * width,
        phases=(Phase.SCORE,),
        formula=f"estimate: tokens_per_batch × ({values} of a layer + {longest} of the mask) × {width}",
        fleeting=True,
    )


def _values_of_a_layer(config: Mapping[str, object]) -> int:
    """Values that a layer has at once for a token."""
    hidden, inner = config.get("hidden_size"), config.get("intermediate_size")
    if not isinstance(hidden, int):
        return 0
    return 6 * hidden + 3 * (inner if isinstance(inner, int) else 4 * hidden)


def with_rewards(ledger: DeviceLedger, rewards: tuple[Holding, ...]) -> DeviceLedger:
    """A device's ledger with reward models; the engine sleeps only after they were asked."""
    held = tuple(
        replace(holding, phases=tuple(phase for phase in EVERY if phase in (*holding.phases, Phase.SCORE)))
        if holding.role == Role.ROLLOUT and holding.name in _KEPT
        else holding
        for holding in ledger.holdings
    )
    return replace(ledger, holdings=(*held, *rewards))
