"""The named shapes: scores for how a response is written, whatever it answers.

Owns: their formulas. Refuses to know: processes, deadlines, answers. Always holds: a score depends on the response alone, so a
row without a ground truth can be scored.

Each is a function of its own keyword arguments that gives the scoring function, as the verifiers are.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from meshloom.rewards.outcome import RewardRequest

Shape = Callable[[RewardRequest], float]


def tag_format(*, tags: str = "think,answer", opened: bool = False) -> Shape:
    """1.0 if the response is ``<think>…</think>``, white space, ``<answer>…</answer>`` and nothing else, else 0.0.

    Each tag stands once, in this order, with something in it that is no white space.

    Args:
        tags: names of the tags, with commas between them.
        opened: the prompt ends with the first tag, so the response begins inside of it.

    Raises:
        ValueError: if no tag is named, one is named twice, or a name has a character that no tag has.
    """
    names = [name.strip() for name in tags.split(",")]
    if not all(re.fullmatch(r"\w[\w.-]*", name) for name in names) or len(set(names)) < len(names):
        raise ValueError(f"tags must be different names with commas between them, such as think,answer; not {tags!r}")
    marks = [mark for name in names for mark in (f"<{name}>", f"</{name}>")][1 if opened else 0 :]

    def score(request: RewardRequest) -> float:
        text = request.response
        if any(text.count(mark) != 1 for mark in marks) or (opened and f"<{names[0]}>" in text):
            return 0.0
        pieces, rest = [], text
        for mark in marks:
            piece, found, rest = rest.partition(mark)
            if not found:
                return 0.0
            pieces.append(piece)
        first = 0 if opened else 1
        inside, between = pieces[first::2], [*pieces[1 - first :: 2], rest]
        return float(all(piece.strip() for piece in inside) and not any(piece.strip() for piece in between))

    return score


def regex_format(*, pattern: str, whole: bool = False) -> Shape:
    """1.0 if the pattern is found in the response, else 0.0.

    Args:
        pattern: Python regular expression; flags are written into it, such as ``(?s)``.
        whole: it must match the whole response, white space at its ends apart.

    Raises:
        ValueError: if the pattern is no regular expression.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"the pattern is no regular expression: {error}") from error

    def score(request: RewardRequest) -> float:
        text = request.response
        return float(bool(compiled.fullmatch(text.strip()) if whole else compiled.search(text)))

    return score


def length_penalty(
    *, max_tokens: int, free_tokens: int = 0, factor: float = 1.0, curve: Literal["linear", "cosine"] = "linear"
) -> Shape:
    """−factor · f(x) with x = (len − free) / (max − free) between 0 and 1; 0 up to ``free_tokens``, −factor from
    ``max_tokens`` on.

    Args:
        max_tokens: length in tokens from which the penalty is whole.
        free_tokens: length up to which there is none.
        factor: the whole penalty.
        curve: ``linear``: f(x) = x; ``cosine``: f(x) = (1 − cos πx) / 2, flat at both ends (as the cosine rewards of Yeo et
        al.
            2025, arXiv:2502.03373).

    Raises:
        ValueError: if ``max_tokens`` is not above ``free_tokens``, the factor is negative, or there is no such curve.
    """
    curves: dict[str, Callable[[float], float]] = {"linear": float, "cosine": lambda x: (1 - math.cos(math.pi * x)) / 2}
    if curve not in curves:
        raise ValueError(f"curve must be linear or cosine, not {curve!r}")
    if not 0 <= free_tokens < max_tokens or factor < 0:
        raise ValueError("max_tokens must be above free_tokens, and neither that nor factor below 0")

    def score(request: RewardRequest) -> float:
        share = (len(request.response_ids) - free_tokens) / (max_tokens - free_tokens)
        return -factor * curves[curve](min(max(share, 0.0), 1.0)) + 0.0

    return score


def repetition_penalty(*, ngram: int = 3, factor: float = 1.0, unit: Literal["words", "tokens"] = "words") -> Shape:
    """−factor · (1 − different n-grams / n-grams): 0 where no n-gram comes twice, near −factor where one comes all the time
    (as in Yeo et al. 2025, arXiv:2502.03373). A response shorter than an n-gram has none.

    Args:
        ngram: words or tokens of an n-gram.
        factor: the most that is subtracted.
        unit: ``words``, compared without case, or the ``tokens`` that were sampled.

    Raises:
        ValueError: if ``ngram`` is below 1, the factor is negative, or there is no such unit.
    """
    if ngram < 1 or factor < 0:
        raise ValueError("ngram must be 1 or more, and factor not below 0")
    if unit not in ("words", "tokens"):
        raise ValueError(f"unit must be words or tokens, not {unit!r}")

    def score(request: RewardRequest) -> float:
        pieces: Sequence[Any] = request.response_ids if unit == "tokens" else request.response.lower().split()
        grams = [tuple(pieces[at : at + ngram]) for at in range(len(pieces) - ngram + 1)]
        return -factor * (1 - len(set(grams)) / len(grams)) + 0.0 if grams else 0.0

    return score


SHAPES: dict[str, Callable[..., Shape]] = {
    "tag_format": tag_format,
    "regex_format": regex_format,
    "length_penalty": length_penalty,
    "repetition_penalty": repetition_penalty,
}
