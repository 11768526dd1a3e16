"""What a judge is asked, and the number in what it writes.

Owns: the template, its fields, the body of a request, and the search for the number. Refuses to know: services, processes.
Always holds: a text without the number, or with one out of range, gives none, never a guess.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import StrictUndefined, Template
from jinja2.sandbox import SandboxedEnvironment

from meshloom.config.reward_settings import JudgeSettings
from meshloom.plan.judge_template import judge_template
from meshloom.rewards.outcome import InvalidReason, Reward, RewardRequest

_SHOWN = 300
"""Characters of a reply that a reason shows."""


class Question:
    """Makes the request of a sample.

    Args:
        settings: of the judge.
    """

    def __init__(self, settings: JudgeSettings) -> None:
        self._settings = settings
        environment = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
        self._template: Template = environment.from_string(judge_template(settings))

    def body(self, request: RewardRequest) -> dict[str, Any]:
        """The body of a request to ``/chat/completions``.

        Raises:
            jinja2.TemplateError: if the template cannot be filled with this sample.
        """
        settings = self._settings
        text = self._template.render(
            question=last_question(request),
            prompt=request.prompt,
            response=request.response,
            answer=request.answer,
            extra=request.extra,
            data_source=request.data_source,
        )
        before = [] if settings.system is None else [{"role": "system", "content": settings.system}]
        return {
            "model": settings.model,
            "messages": [*before, {"role": "user", "content": text}],
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
            **settings.arguments,
        }


def last_question(request: RewardRequest) -> str:
    """The prompt's last message of the user; all of the prompt where it has none."""
    asked = [message["content"] for message in request.chat if message.get("role") == "user"]
    if not asked:
        return request.prompt
    last = asked[-1]
    return last if isinstance(last, str) else " ".join(str(part.get("text", "")) for part in last)


def digest(model_and_body: Mapping[str, Any]) -> str:
    """What is asked, as a key: the same for the same content, whatever the order of its fields."""
    text = json.dumps(model_and_body, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()


def read_number(text: str, settings: JudgeSettings) -> Reward:
    """The reward in what a judge wrote: its number divided by ``scale``, or invalid with what is wrong."""
    number = _by_pattern(text, settings.pattern) if settings.parse == "regex" else _by_field(text, settings.field)
    if number is None:
        sought = f"the pattern {settings.pattern}" if settings.parse == "regex" else f"the field {settings.field}"
        return _no_answer(f"{sought} gives no number in {_shown(text)}")
    low, high = settings.lowest, settings.highest
    if (low is not None and number < low) or (high is not None and number > high):
        bounds = f"{'−∞' if low is None else f'{low:g}'} to {'∞' if high is None else f'{high:g}'}"
        return _no_answer(f"{number:g} is not from {bounds}: {_shown(text)}")
    return Reward(value=number / settings.scale)


def _no_answer(detail: str) -> Reward:
    return Reward(value=None, reason=InvalidReason.NO_ANSWER, detail=detail)


def _shown(text: str) -> str:
    """The end of a reply, where the number should be."""
    whole = " ".join(text.split())
    return repr(whole if len(whole) <= _SHOWN else f"…{whole[-_SHOWN:]}")


def _by_pattern(text: str, pattern: str) -> float | None:
    found = None
    for match in re.finditer(pattern, text):
        found = match
    return None if found is None else _number(found.group(1))


def _by_field(text: str, field: str) -> float | None:
    found = list(_objects(text))
    value: Any = found[-1] if found else None
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return _number(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """JSON objects in a text, one after the other, those inside of others apart."""
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            yield value
        at = text.find("{", end)


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
