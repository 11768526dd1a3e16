"""Settings of environments: what answers the model's turns, its tools, and the bounds of an episode.

Owns: their defaults, ranges and meaning. Refuses to know: templates, processes, what an environment does. (Variables of the
process's environment are ``config.environment``.)
"""

from enum import StrEnum
from typing import Literal

from pydantic import Field

from meshloom.config.base import Count, Place, Places, Positive, Settings


class RewrittenHistory(StrEnum):
    """What to do with a sample whose earlier turns a chat template changes."""

    REFUSE = "refuse"
    SPLIT = "split"


class EnvironmentSettings(Settings):
    """What answers the model's turns. Exactly one of ``tools``, ``gym``, ``custom`` and ``reasoning_gym`` is given."""

    tools: Places = ()
    """Python functions that the model may call, each ``file.py:function`` with type hints and a docstring; the JSON schemas
    made of these go to the chat template. A turn without a call ends the episode; ``reward.function`` judges it."""
    tool_format: Literal["hermes", "llama3_json", "regex"] = "hermes"
    """How a call looks: ``hermes`` (``<tool_call>{"name": …, "arguments": …}</tool_call>``, as Qwen writes it), ``llama3_json``
    (the turn is ``{"name": …, "parameters": …}``), or ``regex``."""
    tool_pattern: str | None = None
    """Regular expression of a call, for ``regex``: a group ``arguments`` (a JSON object, or the plain value of the only
    argument) and, with more than one tool, a group ``name``."""
    max_tool_calls: Count = 16
    """Calls of an episode; further ones are answered with an error."""
    max_answer_characters: Count = 10_000
    """A tool's longer answer is cut there, and says so."""
    gym: Place | None = None
    """``file.py:function`` that makes a text environment in the form of Gymnasium and OpenEnv: ``reset()`` gives a text,
    ``step(text)`` gives (text, reward, terminated, truncated, info)."""
    custom: Place | None = None
    """``file.py:Class`` of your own: see ``meshloom.environments.Environment``."""
    reasoning_gym: bool = False
    """Rows from reasoning-gym as an environment of one turn, judged by the task's own verifier."""
    arguments: dict[str, int | float | bool | str | None] = Field(default_factory=dict)
    """Keyword arguments of the function of ``gym`` or the class of ``custom``."""
    max_turns: Count = 8
    """Turns of the model in an episode; the last one ends it."""
    max_turn_tokens: Count | None = None
    """Longest turn of the model. Default: what is left of ``rollout.max_response_tokens``, which bounds all turns together with
    what the environment says between them."""
    workers: Count | None = None
    """Processes in which environments and tools run. Default: the processors this process may use."""
    step_deadline_s: Positive = 30.0
    """Seconds that a reset, a step or the calls of a turn may take; then its process is killed. A late environment makes the
    sample invalid; late tools are answered with an error."""
    episode_deadline_s: Positive | None = None
    """Seconds that an episode may take from its reset, its waits for the engine included; then its sample is invalid.
    Default: only ``rollout.deadline_s`` bounds it."""
    lockstep: bool = False
    """Generate the next turns of all episodes together, when every environment has answered, and not each as soon as it can be:
    slower, and an embedded engine then repeats a run bit for bit. Otherwise what runs side by side follows from how fast
    environments are, and log-probabilities may differ in their last digits."""
    rewritten_history: RewrittenHistory = RewrittenHistory.REFUSE
    """A template that changes earlier turns (strips their reasoning, for example) makes the sample invalid, or has it ``split``
    there into several samples, each trained on as it was seen."""

    @property
    def gives_rewards(self) -> bool:
        """Whether it judges by itself; tools do not."""
        return not self.tools
