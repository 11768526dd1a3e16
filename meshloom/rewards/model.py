"""Reward models: sequence classifiers with one output that score a prompt and its response.

Owns: loading one, making its inputs, batches, and their scores. Refuses to know: processes, when it is asked, who shares its
device. Always holds: a score is what transformers' own pass over that input alone gives, whatever else is in its batch; a
score that is no finite number, or of an input that is too long, is invalid with its reason.

Batches are padded on the right, after the token that is judged. Inputs of like length are computed together, the longest
first, so that a batch that does not fit is met at once.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from meshloom.config.errors import UserError
from meshloom.config.reward_settings import RewardModelSettings
from meshloom.data.prompts import with_one_begin
from meshloom.data.tokenizer_checks import check_tokenizer
from meshloom.plan.reward_checks import read_reward_folder
from meshloom.rewards.outcome import InvalidReason, Reward, RewardRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Makes a reward model's input from a sample.

    Args:
        name: of the component, for errors.
        tokenizer: of the reward model; none where tokens are read as they were sampled.
        by_template: whether the chat template is used.
        max_tokens: longest input; none if there is no bound.
        truncate: whether a longer one loses its beginning.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase | None
    by_template: bool
    max_tokens: int | None
    truncate: bool

    def read(self, request: RewardRequest) -> list[int] | Reward:
        """Tokens of a sample's input; or why there are none.

        Raises:
            UserError: if the chat template refuses the sample.
        """
        ids = self._ids(request)
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            if not self.truncate:
                detail = f"the input has {len(ids)} tokens, the reward model reads {self.max_tokens}"
                return Reward(value=None, reason=InvalidReason.TOO_LONG, detail=detail)
            ids = ids[-self.max_tokens :]
        if not ids:
            return Reward(value=None, reason=InvalidReason.NO_ANSWER, detail="the input has no tokens")
        return ids

    def _ids(self, request: RewardRequest) -> list[int]:
        if self.tokenizer is None:
            return [*request.prompt_ids, *request.response_ids]
        if not self.by_template:
            # The prompt is read with the special tokens it has: its begin token is one already.
            ids = list(self.tokenizer(request.prompt + request.response).input_ids)
            return with_one_begin(ids, self.tokenizer.bos_token_id)
        chat = [*request.chat, {"role": "assistant", "content": request.response}]
        try:
            found: Any = self.tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)
        except (TemplateError, TypeError) as error:
            raise UserError(
                "the reward model's chat template refuses a chat",
                where=f"reward.components.{self.name}.model",
                why=f"{type(error).__name__}: {error}",
                fix=f"reward.components.{self.name}.model.input=text reads the prompt as the policy saw it",
            ) from error
        return list(found["input_ids"])


def open_reader(name: str, settings: RewardModelSettings, policy: PreTrainedTokenizerBase) -> Reader:
    """What makes the inputs of a reward model.

    Args:
        name: of the component.
        settings: of the model.
        policy: tokenizer of the model that is trained.

    Raises:
        UserError: if the folder is no reward model, or its tokenizer is not as the settings need it.
    """
    path = f"reward.components.{name}.model"
    folder = read_reward_folder(settings.path, f"{path}.path")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder.path), local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the tokenizer in {settings.path} cannot be loaded", where=f"{path}.path", why=str(error)
        ) from error
    check_tokenizer(tokenizer, f"{path}.path")
    has_template = bool(tokenizer.chat_template)
    if settings.input == "template" and not has_template:
        what = "the reward model's tokenizer has no chat template"
        raise UserError(what, where=f"{path}.input", fix=f"{path}.input=text")
    if settings.input == "ids" and tokenizer.get_vocab() != policy.get_vocab():
        what = "the reward model's tokenizer is not that of the model that is trained"
        why = "the tokens that were sampled mean something else to it"
        raise UserError(what, where=f"{path}.input", why=why, fix=f"{path}.input=auto")
    made_for = folder.text_config.get("max_position_embeddings")
    return Reader(
        name=name,
        tokenizer=None if settings.input == "ids" else tokenizer,
        by_template=settings.input == "template" or (settings.input == "auto" and has_template),
        max_tokens=settings.max_tokens or (made_for if isinstance(made_for, int) else None),
        truncate=settings.too_long == "truncate",
    )


def load_reward_model(settings: RewardModelSettings, device: torch.device, where: str) -> "PreTrainedModel":
    """A reward model on a device, frozen.

    Args:
        settings: of the model.
        device: that it computes on.
        where: the setting that names its folder.

    Raises:
        UserError: if the folder cannot be loaded, or weights are missing from it.
    """
    from transformers import AutoModelForSequenceClassification  # seconds, which a plan does not need

    folder = read_reward_folder(settings.path, where)
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            str(Path(folder.path).resolve()),
            dtype=_DTYPES.get(settings.dtype, auto),
            device_map={"": device},
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"the reward model in {settings.path} cannot be loaded: {error}", where=where) from error
    if missing := sorted(info["missing_keys"]):
        raise UserError(
            f"{len(missing)} weights are missing from {settings.path}, among them {missing[0]}",
            where=where,
            why="they would be random numbers",
        )
    return model.eval().requires_grad_(False)


def batches(lengths: Sequence[int], tokens_per_batch: int) -> Iterator[list[int]]:
    """Places of inputs that are computed together: of like length, the longest first; padded they have so many tokens at most,
    but for one that is longer alone."""
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    batch: list[int] = []
    for place in order:
        if batch and lengths[batch[0]] * (len(batch) + 1) > tokens_per_batch:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


@torch.no_grad()
def scores(model: "PreTrainedModel", inputs: Sequence[Sequence[int]], tokens_per_batch: int) -> list[float]:
    """The model's output for each input.

    Args:
        model: with one output.
        inputs: tokens of each, at least one.
        tokens_per_batch: bound on the tokens of a batch, padding included.
    """
    found = [0.0] * len(inputs)
    for places in batches([len(ids) for ids in inputs], tokens_per_batch):
        outputs = _forward(model, [inputs[place] for place in places]).float().cpu().tolist()
        for place, output in zip(places, outputs, strict=True):
            found[place] = output
    return found


def _forward(model: "PreTrainedModel", inputs: Sequence[Sequence[int]]) -> Tensor:
    """Outputs [B] of a batch, the longest input first."""
    config = model.config.get_text_config()
    own, longest = config.pad_token_id, len(inputs[0])
    pad = _padding(inputs) if own is None else own
    ids = torch.tensor([[*each, *[pad] * (longest - len(each))] for each in inputs], device=model.device)
    lengths = torch.tensor([len(each) for each in inputs], device=model.device)
    mask = (torch.arange(longest, device=model.device) < lengths[:, None]).long()
    # Without a padding token of its own a model judges the last token. Told of one that no input ends with, so it does.
    config.pad_token_id = pad
    try:
        return model(input_ids=ids, attention_mask=mask).logits[:, 0]
    finally:
        config.pad_token_id = own


def _padding(inputs: Sequence[Sequence[int]]) -> int:
    """A token that no input ends with."""
    ends = {each[-1] for each in inputs}
    return next(token for token in range(len(ends) + 1) if token not in ends)


class RewardModels:
    """The reward models of a device, of which all parts move together: as much of a model as ``train.residency`` asks of one.

    Args:
        settings: of each, by component.
        device: that they compute on.
    """

    optimizer = None
    """Nothing is trained."""

    def __init__(self, settings: Mapping[str, RewardModelSettings], device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.models = {
            name: load_reward_model(each, device, f"reward.components.{name}.model.path")
            for name, each in settings.items()
        }
        self.module = self.decoder = nn.ModuleList(self.models.values())

    def scores(self, name: str, inputs: Sequence[Sequence[int]]) -> list[float]:
        """What a component's model gives for each input."""
        return scores(self.models[name], inputs, self.settings[name].tokens_per_batch)


def reward_of(score: float) -> Reward:
    """A model's output as a reward."""
    if math.isfinite(score):
        return Reward(value=score)
    return Reward(value=None, reason=InvalidReason.NOT_A_NUMBER, detail=f"the reward model gives {score}")
