"""The named verifiers.

Owns: how an answer is found in a response and compared. Refuses to know: processes, deadlines (they run where they can be
killed). Always holds: a wrong or missing answer is worth 0; a row that cannot be judged (no ground truth, one that cannot
be read) raises, so that it becomes an invalid reward and not a zero.

Each verifier is a function of its own keyword arguments that gives the scoring function; imports and the compilation of
patterns happen then, before the first sample's time begins.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from meshloom.rewards.outcome import RewardRequest
from meshloom.rewards.shaping import SHAPES

Scorer = Callable[[RewardRequest], Any]

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def exact_match(*, ignore_case: bool = False) -> Scorer:
    """1.0 if the response's answer equals the ground truth as text, else 0.0.

    The answer is what stands in the last ``<answer>…</answer>``; without one, in the last ``\\boxed{…}``; without that, the
    last line that is not blank. Both sides are compared after white space is stripped at the ends and every run of it
    inside counts as one space. A ground truth that is a list accepts any of its entries.

    Args:
        ignore_case: compare without case.
    """

    def score(request: RewardRequest) -> float:
        return _equals(_found_answer(request.response), request.answer, ignore_case)

    return score


def regex(*, pattern: str, ignore_case: bool = False) -> Scorer:
    """1.0 if group 1 of the pattern's last match in the response equals the ground truth, else 0.0.

    Compared as in ``exact_match``; flags are written into the pattern, such as ``(?s)``.

    Args:
        pattern: Python regular expression with at least one group.
        ignore_case: compare without case.

    Raises:
        ValueError: if the pattern is no regular expression, or has no group.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"the pattern is no regular expression: {error}") from error
    if not compiled.groups:
        raise ValueError("the pattern needs a group around the answer, such as 'answer: (.*)'")

    def score(request: RewardRequest) -> float:
        matches = list(compiled.finditer(request.response))
        return _equals(matches[-1].group(1) or "", request.answer, ignore_case) if matches else 0.0

    return score


def math_verify() -> Scorer:
    """1.0 if the expression that math-verify finds in the response equals the ground truth, else 0.0.

    The library prefers ``\\boxed{…}`` and what follows words such as "the answer is" to other expressions, late ones to early.
    The ground truth is LaTeX or plain (``\\frac{1}{2}``, ``1/2``, ``0.5``). The library's own time limits work by signals
    and are off: a sample that takes too long is killed with its process.
    """
    from math_verify import parse, verify

    def score(request: RewardRequest) -> float:
        text = str(_ground_truth(request.answer))
        delimited = "$" in text or "\\boxed" in text
        gold = parse(text if delimited else f"\\boxed{{{text}}}", parsing_timeout=None)
        if not gold:
            raise ValueError(f"math-verify cannot read the ground truth {text!r:.200}")
        found = parse(request.response, parsing_timeout=None)
        return float(bool(found) and verify(gold, found, timeout_seconds=None))

    return score


def reasoning_gym() -> Scorer:
    """The score of the task's own verifier, from 0 to 1; some tasks give part of it to a part of the answer.

    What is judged is the text in the last ``<answer>…</answer>``, or the whole response, stripped, where there is none.
    """
    from reasoning_gym import create_dataset
    from reasoning_gym.utils import extract_answer

    judges: dict[tuple[Any, ...], Any] = {}

    def score(request: RewardRequest) -> float:
        extra = request.extra
        if "task" not in extra or "metadata" not in extra:
            raise ValueError("the row is not from reasoning-gym: its extra columns have no task and metadata")
        args: Mapping[str, Any] = extra.get("task_args", {})
        key = (extra["task"], *sorted(args.items()))
        if key not in judges:
            judges[key] = create_dataset(extra["task"], size=1, seed=0, **args)
        answer = extract_answer(request.response)
        entry = {"question": extra.get("question", ""), "answer": request.answer, "metadata": extra["metadata"]}
        return float(judges[key].score_answer(request.response.strip() if answer is None else answer, entry))

    return score


def code(**kwargs: Any) -> Scorer:
    """The share of the row's tests that the program in the response passes; see ``rewards.code``. Its arguments are those of
    ``reward.code``."""
    from meshloom.rewards.code.judge import judge_from

    return judge_from(**kwargs).score


VERIFIERS: dict[str, Callable[..., Scorer]] = {
    "exact_match": exact_match,
    "regex": regex,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
    **SHAPES,
    "code": code,
}
"""What settings name: verifiers, and shapes of a response."""


def _found_answer(response: str) -> str:
    if tagged := _ANSWER_TAG.findall(response):
        return tagged[-1]
    boxed = _last_boxed(response)
    if boxed is not None:
        return boxed
    lines = [line for line in response.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _last_boxed(response: str) -> str | None:
    """Content of the last ``\\boxed{…}`` whose braces close."""
    end = len(response)
    while (start := response.rfind("\\boxed{", 0, end)) >= 0:
        depth = 0
        for place in range(start + len("\\boxed"), len(response)):
            depth += {"{": 1, "}": -1}.get(response[place], 0)
            if depth == 0:
                return response[start + len("\\boxed{") : place]
        end = start
    return None


def _equals(found: str, answer: Any, ignore_case: bool) -> float:
    wanted = answer if isinstance(answer, list | tuple) else [_ground_truth(answer)]
    return float(_plain_text(found, ignore_case) in {_plain_text(str(one), ignore_case) for one in wanted})


def _ground_truth(answer: Any) -> Any:
    if answer is None:
        raise ValueError("the row has no ground truth")
    return answer


def _plain_text(text: str, ignore_case: bool) -> str:
    text = " ".join(text.split())
    return text.casefold() if ignore_case else text
