"""A generative judge: a language model behind an OpenAI-compatible service gives each sample its number.

Owns: requests, their limits, deadlines and repeats, and what they cost. Refuses to know: what is asked and how the number is
found (``judging``), where replies are kept (``replies``). Always holds: a sample that gets no number in time is invalid with
the service's last word; the key of the service is in the header of its requests and nowhere else; what was asked before is
not asked again.
"""

import asyncio
import json
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2
from jinja2 import TemplateError

from meshloom.config.environment import secret
from meshloom.config.errors import UserError
from meshloom.config.reward_settings import JudgeSettings
from meshloom.rewards.judging import Question, digest, read_number
from meshloom.rewards.outcome import InvalidReason, Reward, RewardRequest
from meshloom.rewards.replies import KeptReplies, Reply

DEADLINE_S = 300.0
"""Seconds that a sample may take, where the settings do not say."""
_AGAIN = frozenset({408, 409, 425, 429})
_MAX_BYTES = 8 * 2**20
"""A longer reply is none."""
_SHOWN = 300
_CLOSE_S = 10.0
"""Seconds in which connections are closed in order."""


class Failed(Exception):
    """A request gave no reply.

    Args:
        why: in words.
        again: whether another one may.
        wait_s: seconds that the service asks to wait; 0 if it says nothing.
    """

    def __init__(self, why: str, *, again: bool, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.why, self.again, self.wait_s = why, again, wait_s


class Judge:
    """Asks a service for each sample, in a thread of its own; a context.

    Args:
        name: of the component.
        settings: of the judge.
        deadline_s: seconds a sample may take from its first request on.
        kept: file of replies; none: no reply is kept.

    Raises:
        UserError: if the key of the service is not in the environment or cannot be in a header, or the template cannot be
            read.
    """

    def __init__(self, name: str, settings: JudgeSettings, *, deadline_s: float, kept: Path | None) -> None:
        self._name, self._settings, self._deadline_s = name, settings, deadline_s
        self._key = self._read_key()
        try:
            self._question = Question(settings)
        except (TemplateError, OSError, UnicodeDecodeError) as error:
            what = "the judge's template cannot be used"
            raise UserError(what, where=f"reward.components.{name}.judge.prompt", why=str(error)) from error
        self._url = f"{settings.url.rstrip('/')}/chat/completions"
        self._kept = None if kept is None else KeptReplies(kept)
        self._disk = ThreadPoolExecutor(1, thread_name_prefix=f"judge-{name}-replies")
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._pending: dict[str, asyncio.Task[Reply]] = {}
        self._free = asyncio.Semaphore(settings.max_concurrent)
        self._next_begin, self._chance = 0.0, random.Random()
        self._made_client: httpx2.AsyncClient | None = None
        self._is_open, self._submitting = True, threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"judge-{name}", daemon=True)
        self._thread.start()

    def _read_key(self) -> str:
        variable = self._settings.api_key_variable
        if variable is None:
            return ""
        where = f"reward.components.{self._name}.judge.api_key_variable"
        try:
            key = secret(variable).strip()
        except KeyError:
            key = ""
        if not key:
            raise UserError(
                f"the environment variable {variable} is not set",
                where=where,
                why="it must hold the key of the judge's service",
                fix=f"export {variable}=…",
            )
        if not all("!" <= character <= "~" for character in key):
            raise UserError(
                f"the environment variable {variable} holds no key",
                where=where,
                why="it has a character that cannot be in a key: white space, a control character or one outside of ASCII",
                fix=f"export {variable}=… as the service gave it",
            )
        return key

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def submit(self, request: RewardRequest) -> "Future[Reward]":
        """Ask about a sample while others run.

        Raises:
            RuntimeError: if the judge is closed.
        """
        with self._submitting:
            if not self._is_open:
                raise RuntimeError("the judge is closed")
            return asyncio.run_coroutine_threadsafe(self._judge(request), self._loop)

    def begin(self, scorings: Sequence[object]) -> None:
        """Samples are asked about when they come, whatever group they are of."""

    def take_counts(self) -> dict[str, float]:
        """Requests, replies from the file, tokens and cost since the last call."""
        with self._counting:
            counts, self._counts = self._counts, Counter()
        settings = self._settings
        prompt, completion = counts["prompt_tokens"], counts["completion_tokens"]
        cost = prompt * settings.price_per_million_prompt_tokens
        cost += completion * settings.price_per_million_completion_tokens
        names = ("requests", "requests_repeated", "replies_kept", "prompt_tokens", "completion_tokens")
        return {**{name: float(counts[name]) for name in names}, "cost": cost / 1e6}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all requests; samples without a reward end with ``CancelledError``. A second call does nothing."""
        with self._submitting:
            was_open, self._is_open = self._is_open, False
        if not was_open:
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._kept is not None:
            self._disk.submit(self._kept.close).result()
        self._disk.shutdown()

    async def _end(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._made_client is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._made_client.aclose(), _CLOSE_S)

    def _client(self) -> httpx2.AsyncClient:
        if self._made_client is None:
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            limits = httpx2.Limits(max_connections=self._settings.max_concurrent)
            # Deadlines are those of whole requests, which no server can stretch byte by byte.
            self._made_client = httpx2.AsyncClient(headers=headers, limits=limits, timeout=None)
        return self._made_client

    async def _judge(self, request: RewardRequest) -> Reward:
        try:
            body = self._question.body(request)
        except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
            detail = f"the judge's template: {type(error).__name__}: {error}"
            return Reward(value=None, reason=InvalidReason.RAISED, detail=detail)
        try:
            reply = await self._reply(digest({"url": self._url, "body": body}), body)
        except TimeoutError:
            detail = f"no answer of the judge within {self._deadline_s:g} s"
            return Reward(value=None, reason=InvalidReason.DEADLINE, detail=detail)
        except Failed as failed:
            return Reward(value=None, reason=InvalidReason.SERVICE, detail=failed.why)
        return read_number(reply.text, self._settings)

    async def _reply(self, question: str, body: Mapping[str, Any]) -> Reply:
        """The reply that is kept, that is on its way for another sample, or that is asked for now."""
        task = self._pending.get(question)
        if task is None:
            task = self._pending[question] = asyncio.create_task(self._kept_or_asked(question, body))
            task.add_done_callback(lambda _: self._pending.pop(question, None))
        else:
            self._count(replies_kept=1)
        return await asyncio.shield(task)

    async def _kept_or_asked(self, question: str, body: Mapping[str, Any]) -> Reply:
        if self._kept is not None:
            found = await self._loop.run_in_executor(self._disk, self._kept.get, question)
            if found is not None:
                self._count(replies_kept=1)
                return found
        async with self._free:
            await self._turn()
            async with asyncio.timeout(self._deadline_s):
                reply = await self._ask(body)
        self._count(prompt_tokens=reply.prompt_tokens, completion_tokens=reply.completion_tokens)
        if self._kept is not None and read_number(reply.text, self._settings).valid:
            await self._loop.run_in_executor(self._disk, self._kept.put, question, reply)
        return reply

    async def _turn(self) -> None:
        """Wait until a request may begin."""
        if (per_minute := self._settings.requests_per_minute) is None:
            return
        now = time.monotonic()
        begin = max(self._next_begin, now)
        self._next_begin = begin + 60.0 / per_minute
        await asyncio.sleep(begin - now)

    async def _ask(self, body: Mapping[str, Any]) -> Reply:
        """Ask until there is a reply.

        Raises:
            Failed: with what the service said last.
        """
        for number in range(self._settings.retries + 1):
            try:
                self._count(requests=1, requests_repeated=int(number > 0))
                return await self._request(body)
            except Failed as failed:
                last = failed
            if not last.again or number == self._settings.retries or last.wait_s > self._settings.longest_backoff_s:
                break
            doubled = self._settings.backoff_s * 2**number * self._chance.uniform(1.0, 1.25)
            await asyncio.sleep(max(last.wait_s, min(doubled, self._settings.longest_backoff_s)))
            await self._turn()
        tries = f" (after {number + 1} requests)" if number else ""
        raise Failed(f"{last.why}{tries}", again=False)

    async def _request(self, body: Mapping[str, Any]) -> Reply:
        """One request.

        Raises:
            Failed: if it gives no reply.
        """
        deadline_s = self._settings.request_deadline_s
        try:
            async with (
                asyncio.timeout(deadline_s) as limit,
                self._client().stream("POST", self._url, json=body) as response,
            ):
                data = bytearray()
                async for chunk in response.aiter_bytes():
                    data += chunk
                    if len(data) > _MAX_BYTES:
                        raise Failed(f"a reply of more than {_MAX_BYTES} bytes", again=False)
        except TimeoutError:
            if not limit.expired():  # the sample's own time is over
                raise
            raise Failed(f"no reply within {deadline_s:g} s", again=True) from None
        except httpx2.LocalProtocolError:  # its text may quote headers
            raise Failed("LocalProtocolError: the request cannot be sent", again=True) from None
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise Failed(self._clean(f"{type(error).__name__}: {error}"), again=True) from None
        except httpx2.InvalidURL as error:
            raise Failed(self._clean(str(error)), again=False) from None
        if response.status_code != 200:
            text = self._clean(" ".join(data.decode("utf-8", "replace").split()))
            again = response.status_code in _AGAIN or response.status_code >= 500
            wait_s = seconds_to_wait(response.headers.get("Retry-After", "")) if again else 0.0
            raise Failed(f"status {response.status_code}: {text}", again=again, wait_s=wait_s)
        return self._read(bytes(data))

    def _read(self, data: bytes) -> Reply:
        try:
            told = json.loads(data)
            text = told["choices"][0]["message"]["content"]
            usage = told.get("usage") or {}
            prompt, completion = (int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            shown = self._clean(data.decode("utf-8", "replace"))
            raise Failed(f"a reply that is no chat completion ({type(error).__name__}): {shown}", again=True) from None
        text = self._without_key(text) if isinstance(text, str) else ""
        return Reply(text=text, prompt_tokens=prompt, completion_tokens=completion)

    def _clean(self, text: str) -> str:
        """A service's words without its key, should it repeat it, and no more of them than can be read."""
        return self._without_key(text)[:_SHOWN]

    def _without_key(self, text: str) -> str:
        """A text with stars for the key, as it is and as JSON or Python would quote it."""
        for form in {self._key, json.dumps(self._key)[1:-1], repr(self._key)[1:-1]} if self._key else ():
            text = text.replace(form, "***")
        return text

    def _count(self, **more: int) -> None:
        with self._counting:
            self._counts.update(more)


def seconds_to_wait(text: str) -> float:
    """What ``Retry-After`` says: seconds, or a date; 0 if it says nothing that can be read."""
    text = text.strip()
    try:
        seconds = float(text)
        return 0.0 if math.isnan(seconds) else max(seconds, 0.0)
    except ValueError:
        pass
    try:
        until = parsedate_to_datetime(text)
    except (ValueError, TypeError):
        return 0.0
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return max((until - datetime.now(UTC)).total_seconds(), 0.0)
