"""What every engine refuses before it starts.

Owns: the rules for requests. Refuses to know: engines. Always holds: a malformed request is found before any work.
"""

from collections.abc import Sequence

from meshloom.config.errors import UserError
from meshloom.rollout.protocol import Request


def check_requests(requests: Sequence[Request], *, vocabulary: int, can_decode: bool) -> None:
    """Refuse requests that no engine could serve.

    Raises:
        ValueError: if a request is malformed.
        UserError: if stop strings are asked of an engine that cannot decode.
    """
    if len({request.id for request in requests}) != len(requests):
        raise ValueError("two requests have the same id")
    for request in requests:
        if not len(request.prompt_ids) or not len(request.seeds):
            raise ValueError(f"request {request.id} has no prompt or no seeds")
        if not 0 <= request.num_greedy <= len(request.seeds):
            raise ValueError(
                f"request {request.id} has {len(request.seeds)} samples, {request.num_greedy} of them greedy"
            )
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocabulary:
            raise ValueError(f"request {request.id} has token ids outside the model's 0 to {vocabulary - 1}")
        if request.params.stop_strings and not can_decode:
            raise UserError("stop strings need an engine that can decode", fix="give the engine a tokenizer's decode")


def kv_tokens(request: Request) -> int:
    """Most tokens a sample of a request has in the cache: the last one drawn is never computed."""
    return len(request.prompt_ids) + request.params.max_tokens - 1


def require_fit(requests: Sequence[Request], *, needed_bytes: int, cache_bytes: int, bytes_per_token: int) -> None:
    """Refuse requests whose longest alone does not fit the cache.

    Args:
        requests: what is asked.
        needed_bytes: what the longest takes when it is alone.
        cache_bytes: what the cache may take.
        bytes_per_token: keys and values of a token.

    Raises:
        UserError: with the numbers.
    """
    if needed_bytes <= cache_bytes:
        return
    longest = max(requests, key=kv_tokens)
    raise UserError(
        f"a sequence of {len(longest.prompt_ids)} prompt tokens and up to {longest.params.max_tokens} generated ones "
        f"does not fit the key-value cache",
        where="rollout.kv_cache_bytes",
        why=f"alone it takes {needed_bytes:,} bytes ({bytes_per_token:,} a token), the cache may take {cache_bytes:,}",
        fix=f"kv_cache_bytes of at least {needed_bytes:,}, or shorter prompts or responses",
    )
