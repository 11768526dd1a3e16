"""Between our requests and vLLM's: what is asked, what comes back, and what vLLM cannot be asked.

Owns: the translation of parameters and seeds, and the record of a sample that runs. Refuses to know: the engine's life,
weights. Always holds: a sample's tokens and log-probs are vLLM's own, none is cut or made again; its tokens know their
weights' version.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshloom.config.errors import UserError
from meshloom.config.rollout_settings import VLLM_TEMPERATURES
from meshloom.rollout.protocol import Completion, FinishReason, Request, SamplingParams
from meshloom.rollout.stopping import StopRule

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmParams


@dataclass
class RunningSample:
    """A sample that is in vLLM.

    Args:
        request: whose it is.
        index: which of the request's samples.
        rule: when it ends.
        key: vLLM's name of it now.
        internal: the name vLLM gave it itself.
        ids, logprobs: what came so far, where tokens are handed on one by one.
        marks: (tokens there were, version from there on), in order; the first is at 0.
    """

    request: Request
    index: int
    rule: StopRule
    key: str = ""
    internal: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_greedy(self) -> bool:
        """Whether it has the most probable token each time."""
        return self.request.params_of(self.index).temperature == 0

    @property
    def streams(self) -> bool:
        """Whether each token is looked at as it comes: stop strings are found here, not in vLLM, which sees no text."""
        return bool(self.rule.strings)

    def add(self, ids: Sequence[int], logprobs: Sequence[float]) -> FinishReason | None:
        """Take tokens that came, one by one, up to the one that ends it."""
        for token, logprob in zip(ids, logprobs, strict=True):
            self.ids.append(token)
            self.logprobs.append(logprob)
            if (reason := self.rule.reason(self.ids)) is not None:
                return reason
        return None

    def completion(self, finish: FinishReason) -> Completion:
        """The finished sample."""
        return Completion(
            request_id=self.request.id,
            index=self.index,
            ids=self.ids,
            logprobs=[0.0] * len(self.ids) if self.is_greedy else self.logprobs,
            versions=self._versions(),
            finish=finish,
        )

    def _versions(self) -> list[int]:
        versions: list[int] = []
        ends = [start for start, _ in self.marks[1:]] + [len(self.ids)]
        for (_, version), end in zip(self.marks, ends, strict=True):
            versions += [version] * (min(end, len(self.ids)) - len(versions))
        return versions


def vllm_params(sample: RunningSample) -> "VllmParams":
    """vLLM's record of one sample: one seed, our end tokens as its stop tokens, no text."""
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    params = sample.request.params_of(sample.index)
    return VllmParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        stop_token_ids=sorted(sample.rule.ids),
        ignore_eos=True,
        seed=vllm_seed(sample.request.seeds[sample.index]),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if sample.streams else RequestOutputKind.FINAL_ONLY,
    )


def vllm_seed(seed: int) -> int:
    """Any integer as one that vLLM takes. Its -1 would mean no seed."""
    return int.from_bytes(hashlib.blake2b(str(int(seed)).encode(), digest_size=8).digest(), "little") >> 1


def finish_reason(reason: str) -> FinishReason:
    """vLLM's reason as ours.

    Raises:
        RuntimeError: if vLLM gave up on a sample.
    """
    known = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
    if reason not in known:
        raise RuntimeError(f"vLLM ended a sample with {reason!r}")
    return known[reason]


def token_logprobs(flat: Any) -> list[float]:
    """Log-probs of the sampled tokens: the first entry of each position."""
    return [flat.logprobs[start] for start in flat.start_indices]


def require_possible(requests: Sequence[Request], *, longest: int) -> None:
    """Refuse what vLLM would never answer, or answer in another way than it is asked.

    Args:
        requests: to be generated.
        longest: prompt and response together, in tokens, at most; the cache holds at least one such sequence.

    Raises:
        UserError: with the numbers.
    """
    for request in requests:
        _check_params(request.params)
        prompt, response = len(request.prompt_ids), request.params.max_tokens
        if prompt + response > longest:
            raise UserError(
                f"a sequence of {prompt} prompt tokens and up to {response} generated ones does not fit vLLM",
                where="rollout.vllm.max_model_len",
                why=f"it was opened for sequences of up to {longest:,} tokens",
                fix=f"max_model_len of at least {prompt + response}, or shorter prompts or responses",
            )


def _check_params(params: SamplingParams) -> None:
    coldest, hottest = VLLM_TEMPERATURES
    if params.temperature and not coldest <= params.temperature <= hottest:
        raise UserError(
            f"vLLM does not sample at a temperature of {params.temperature:g}",
            where="rollout.sampling.temperature",
            fix=f"0, {coldest:g} to {hottest:g}, or rollout.engine=torch",
        )
    if params.min_p and params.top_p < 1 and params.temperature:
        raise UserError(
            "vLLM cannot use top_p and min_p together as they are meant here",
            where="rollout.sampling",
            why="it applies min-p before top-p: the share that top-p keeps would be another one",
            fix="use one of them, or rollout.engine=torch",
        )
