"""When a sample ends: its length, end and stop tokens, stop strings.

Owns: the rule of one request. Refuses to know: where tokens come from. Always holds: a stop string is found in the step
that completes it, also when it spans several tokens or lies inside one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshloom.rollout.protocol import FinishReason, SamplingParams

Decode = Callable[[Sequence[int]], str]

_SLACK_TOKENS = 4
"""Tokens decoded before those that can hold a stop string: a decoder may change the first token of a piece (a leading
space, a character of several bytes)."""


@dataclass(frozen=True)
class StopRule:
    """Ends samples of one request.

    Args:
        max_tokens: longest response.
        ids: tokens that end it.
        strings: texts that end it.
        decode: from token ids to text; needed for ``strings``.
    """

    max_tokens: int
    ids: frozenset[int]
    strings: tuple[str, ...] = ()
    decode: Decode | None = None

    @classmethod
    def of(cls, params: SamplingParams, eos_ids: Sequence[int], decode: Decode | None) -> "StopRule":
        ends = params.stop_ids if params.ignore_eos else (*params.stop_ids, *eos_ids)
        return cls(params.max_tokens, frozenset(ends), params.stop_strings, decode)

    def reason(self, ids: Sequence[int]) -> FinishReason | None:
        """Why a response that has just got its last token ends, if it does."""
        if ids[-1] in self.ids or (self.strings and self._found(ids)):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(ids) >= self.max_tokens else None

    def _found(self, ids: Sequence[int]) -> bool:
        """Whether the end of the response holds a stop string. Decodes no more tokens than it must."""
        longest = max(len(text) for text in self.strings)
        count = longest
        while True:
            tail = ids[-(_SLACK_TOKENS + count + 1) :]
            text = self.decode(tail)
            if any(stop in text for stop in self.strings):
                return True
            if len(tail) == len(ids) or len(self.decode(tail[_SLACK_TOKENS:-1])) >= longest:
                return False
            count *= 2
