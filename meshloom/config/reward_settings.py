"""Settings of rewards that are put together: named components, reward models, judges, the penalty for overlong responses.

Owns: their defaults, ranges and meaning, and the names that a run's components have. Refuses to know: processes, models'
files, services.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, Protocol

from pydantic import Field

from meshloom.config.base import Count, CountOrZero, NotNegative, Place, Positive, Settings
from meshloom.config.names import RewardForm

Scalars = dict[str, int | float | bool | str | None]
FUNCTION, OVERLONG = "function", "overlong"
"""Names of the components that ``reward.function`` and ``reward.overlong`` are."""


class OverlongSettings(Settings):
    """DAPO's soft penalty for responses that come near the longest length (arXiv:2503.14476): with ``len`` the tokens of the
    response, min(−(len − (max − buffer)) / buffer · factor, 0) is added to its reward."""

    max_tokens: Count | None = None
    """Longest response that the penalty counts with. Default: ``rollout.max_response_tokens``."""
    buffer_tokens: Count
    """How long before ``max_tokens`` the penalty begins."""
    factor: NotNegative = 1.0
    """The penalty of a response of ``max_tokens``."""


class RewardModelSettings(Settings):
    """A sequence-classification model with one output that scores a prompt and its response."""

    path: Place
    """Hugging Face folder: config.json with one label, safetensors, tokenizer."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the model. ``auto``: bfloat16 on a GPU, float32 elsewhere."""
    input: Literal["auto", "template", "text", "ids"] = "auto"
    """What the model reads. ``template``: the prompt's chat and the response as the assistant's message, by the chat template
    of its own tokenizer. ``text``: the prompt as the policy saw it and the response, in its own tokens. ``ids``: the very
    tokens that were sampled, where both have the same tokenizer. ``auto``: template if its tokenizer has one, else text."""
    max_tokens: Count | None = None
    """Longest input in tokens. Default: the positions that the model was made for."""
    too_long: Literal["invalid", "truncate"] = "invalid"
    """A longer input makes the sample invalid, or loses its beginning."""
    tokens_per_batch: Count = 16384
    """Tokens of a batch, padding included: inputs of like length are computed together. One longer input is a batch of its
    own."""


class JudgeSettings(Settings):
    """A language model behind an OpenAI-compatible service that is asked for a number."""

    url: str
    """Address of the service up to its version, such as ``http://localhost:8000/v1``; ``/chat/completions`` is put behind
    it."""
    model: str
    """Name of the model there."""
    api_key_variable: str | None = None
    """Environment variable that holds the key of the service. The key itself is written nowhere."""
    prompt: str | None = None
    """The question to the judge, a Jinja template over ``question`` (the prompt's last message of the user), ``prompt`` (all
    of it as text), ``response``, ``answer``, ``extra`` and ``data_source``. Default: one that asks for ``Score: N`` from 0 to
    10."""
    prompt_file: Place | None = None
    """A file with the template, in place of ``prompt``."""
    system: str | None = None
    """Put before it as a system message."""
    parse: Literal["regex", "json"] = "regex"
    """How the number is found in what the judge writes."""
    pattern: str = r"(?i)score\**\s*[:=]\s*\**\s*(-?\d+(?:\.\d+)?)"
    """``regex``: group 1 of the last match is the number."""
    field: str = "score"
    """``json``: name of the number in the last JSON object that the judge writes; dots lead into objects."""
    lowest: float | None = 0.0
    """A lower number is no answer; none: no bound."""
    highest: float | None = 10.0
    """A higher number is no answer; none: no bound."""
    scale: Positive = 10.0
    """The number is divided by this."""
    temperature: NotNegative = 0.0
    """Of the judge's own sampling."""
    max_tokens: Count = 1024
    """Longest reply of the judge."""
    arguments: Scalars = Field(default_factory=dict)
    """Further fields of each request, by the service's names."""
    max_concurrent: Annotated[int, Field(ge=1, le=4096)] = 16
    """Requests that are on at once."""
    requests_per_minute: Positive | None = None
    """Most requests that begin in a minute, evenly spaced; none: no bound."""
    request_deadline_s: Positive = 60.0
    """Seconds one request may take, from connecting to the last byte."""
    retries: CountOrZero = 5
    """Further requests after one that met a full or failing service: status 408, 409, 425, 429 or 5xx, a connection that
    breaks, the deadline of a request, a reply that is no JSON."""
    backoff_s: Positive = 1.0
    """Seconds before the first further request, twice as many before each one after it; ``Retry-After`` of the service is
    honoured where it says more."""
    longest_backoff_s: Positive = 60.0
    """Most seconds between two requests. A service that says ``Retry-After`` more than this is not asked again."""
    cache: Place | None = None
    """File that keeps replies by what was asked, and is asked first. Several runs may share it. Default:
    ``judge-NAME.sqlite`` in the run's folder."""
    use_cache: bool = True
    """Keep replies at all."""
    price_per_million_prompt_tokens: NotNegative = 0.0
    """What a million tokens read cost, in any currency."""
    price_per_million_completion_tokens: NotNegative = 0.0
    """What a million tokens written cost."""


class ComponentSettings(Settings):
    """One part of the reward. Exactly one of ``function``, ``model`` and ``judge`` is given."""

    function: Place | None = None
    """``file.py:function``, or a named one, as ``reward.function``."""
    form: RewardForm | None = None
    """How a function of a file is called, as ``reward.form``."""
    kwargs: Scalars = Field(default_factory=dict)
    """Further keyword arguments of the function."""
    model: RewardModelSettings | None = None
    """A reward model."""
    judge: JudgeSettings | None = None
    """A language model that is asked."""
    weight: float = 1.0
    """The reward is the sum of each component times its weight. With 0 a component is only logged, and makes no sample
    invalid."""
    fallback: float | None = None
    """Number that stands in where the component is invalid; it is counted and told. Default: none, and the sample is
    invalid."""
    deadline_s: Positive | None = None
    """Seconds one call of a function, or one sample of a judge, may take. Default: ``reward.deadline_s`` for a function; 300
    for a judge, all its requests and the waits between them together. A reward model has none of its own."""


class Rewarding(Protocol):
    """What of the reward's settings names components."""

    @property
    def components(self) -> Mapping[str, ComponentSettings]: ...
    @property
    def overlong(self) -> OverlongSettings | None: ...


def reward_models(reward: Rewarding) -> dict[str, RewardModelSettings]:
    """The reward's models, by component."""
    return {name: each.model for name, each in reward.components.items() if each.model is not None}


def component_names(reward: Rewarding) -> tuple[str, ...]:
    """Names of the reward's components; none where one function alone gives it."""
    if not reward.components and reward.overlong is None:
        return ()
    names = tuple(reward.components) or (FUNCTION,)
    return names if reward.overlong is None else (*names, OVERLONG)


def solving_component(reward: Rewarding, given: str | None) -> str | None:
    """The component that says what is solved; none: the whole reward. A penalty for length makes no answer wrong.

    Args:
        reward: settings of it.
        given: the name that the settings give.
    """
    if given is None and reward.overlong is not None and not reward.components:
        return FUNCTION
    return given
