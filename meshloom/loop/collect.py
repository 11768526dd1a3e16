"""From prompts to scored groups: generate, and score each sample as it finishes.

Owns: one step's rollout: requests, seeds, retries, and the making of samples. Refuses to know: losses, schedules. Always
holds: a group's samples stand in the order of their seeds, whatever finished first; the tokens that were sampled are the
tokens that are trained on; a sample that was not finished or not scored never has a number for a reward.
"""

import hashlib
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from meshloom.data.rows import Prompt
from meshloom.loop.baseline import GreedySample, greedy_record, with_baseline
from meshloom.loop.control import tried_twice
from meshloom.loop.stage import Attempt, Collected, Draw
from meshloom.loop.token_columns import episode_fields, prompt_length, token_columns, version_range
from meshloom.observe.timing import PhaseClock
from meshloom.plan.residency import Phase
from meshloom.rewards.combined import Scorer, Scoring
from meshloom.rewards.outcome import RewardRequest
from meshloom.rollout.protocol import Completion, Engine, FinishReason, Request, SamplingParams
from meshloom.samples import Samples

UNFINISHED = (FinishReason.DEADLINE, FinishReason.ABORTED)
_MOMENT_S = 0.02


def sample_seed(run_seed: int, draw: int, index: int, purpose: str = "train") -> int:
    """Seed of one sample, from what it is: independent of batching, order and process."""
    digest = hashlib.blake2b(f"{purpose}/{run_seed}/{draw}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class Scored:
    """A finished sample, its text, and its reward on its way."""

    completion: Completion
    text: str
    scoring: Scoring


@dataclass
class Collector:
    """Makes scored groups out of prompts.

    Args:
        engine: generates.
        scorer: gives rewards.
        prompts: all prompts of the source.
        decode: texts of several samples' token ids, special tokens removed.
        params: the sampling distribution.
        samples_per_prompt: samples of each draw.
        seed: the run's seed.
        purpose: keeps the seeds of training and validation apart.
        system_prompt: that stands before each chat.
        enter: called as a phase begins that comes after the first: scoring, and generating once more.
        greedy: whether each draw has a greedy sample beside its own, whose reward is their baseline.
    """

    engine: Engine
    scorer: Scorer
    prompts: Sequence[Prompt]
    decode: Callable[[Sequence[Sequence[int]]], list[str]]
    params: SamplingParams
    samples_per_prompt: int
    seed: int
    purpose: str = "train"
    system_prompt: str | None = None
    enter: Callable[[Phase], None] = lambda phase: None
    greedy: bool = False
    decode_at_once: int = 64
    """Samples whose text is made in one call, when many finish together."""

    @property
    def samples_each(self) -> int:
        """Samples of each draw; the greedy one is the last of its request, and shares the others' prompt."""
        return self.samples_per_prompt + self.greedy

    def check(self) -> None:
        """Let the engine refuse a prompt that it could never answer; nothing is generated.

        Raises:
            UserError: as ``Engine.generate``.
        """
        self.engine.generate(self._requests([Draw(i, i) for i in range(len(self.prompts))]), deadline_s=0.0)

    def collect(self, draws: Sequence[Draw], *, deadline_s: float, clock: PhaseClock) -> Collected[Samples]:
        """Generate and score the samples of each draw; waiting for rewards is a phase of its own.

        A draw with unfinished samples is tried once more, with the same deadline, then dropped.
        """
        first = self.attempt(draws, deadline_s=deadline_s, clock=clock)

        def again(unfinished: Sequence[Draw]) -> Attempt[Samples]:
            self.enter(Phase.GENERATE)
            return self.attempt(unfinished, deadline_s=deadline_s, clock=clock)

        return tried_twice(draws, first, again)

    def attempt(self, draws: Sequence[Draw], *, deadline_s: float, clock: PhaseClock) -> Attempt[Samples]:
        """Generate and score the samples of each draw, once."""
        by_number = {draw.number: draw for draw in draws}
        finished: dict[int, dict[int, Scored]] = {draw.number: {} for draw in draws}
        for completions in self._finished(self.engine.generate(self._requests(draws), deadline_s=deadline_s)):
            texts = self.decode([completion.ids for completion in completions])
            for completion, text in zip(completions, texts, strict=True):
                number = completion.request_id
                prompt = self.prompts[by_number[number].prompt]
                scoring = self.scorer.submit(self._reward_request(prompt, text, completion))
                group = finished[number]
                group[completion.index] = Scored(packed(completion), text, scoring)
                if len(group) == self.samples_each:
                    self.scorer.begin([group[place].scoring for place in sorted(group)])
        with clock.phase("score"):
            self.enter(Phase.SCORE)
            for parts in finished.values():
                for part in parts.values():
                    part.scoring.result()
        whole = {draw.number for draw in draws if len(finished[draw.number]) == self.samples_each}
        # What a group is made of goes as it is made: not all of it is there twice.
        groups = {draw.number: self._group(draw, finished.pop(draw.number)) for draw in draws if draw.number in whole}
        return Attempt(groups, [draw for draw in draws if draw.number not in whole])

    def _finished(self, completions: Iterable[Completion]) -> Iterator[list[Completion]]:
        """Finished samples in batches of those that come within a moment of each other."""
        batch: list[Completion] = []
        for completion in completions:
            if completion.finish in UNFINISHED:
                continue
            if not batch:
                began = time.monotonic()
            batch.append(completion)
            if len(batch) >= self.decode_at_once or time.monotonic() - began > _MOMENT_S:
                yield batch
                batch = []
        if batch:
            yield batch

    def _requests(self, draws: Sequence[Draw]) -> list[Request]:
        return [
            Request(
                id=draw.number,
                prompt_ids=self.prompts[draw.prompt].ids,
                params=self.params,
                seeds=[sample_seed(self.seed, draw.number, k, self.purpose) for k in range(self.samples_each)],
                num_greedy=int(self.greedy),
            )
            for draw in draws
        ]

    def _group(self, draw: Draw, found: Mapping[int, "Scored"]) -> Samples:
        parts = [found[k] for k in range(self.samples_per_prompt)]
        prompt = self.prompts[draw.prompt]
        prompt_length = len(prompt.ids)
        completions = [part.completion for part in parts]
        rewards = [part.scoring.result() for part in parts]
        count = len(parts)
        read = np.zeros(prompt_length)
        group = Samples(
            lengths=torch.tensor([prompt_length + len(c.ids) for c in completions]),
            tokens={
                "ids": _column([part for c in completions for part in (prompt.ids, c.ids)], np.int64),
                "mask": _column([part for c in completions for part in (read, np.ones(len(c.ids)))], np.bool_),
                "sampler_logprob": _column([part for c in completions for part in (read, c.logprobs)], np.float32),
                "version": _column([part for c in completions for part in (read, c.versions)], np.int32),
            },
            rows={
                "group": torch.full((count,), draw.number),
                "prompt": torch.full((count,), draw.prompt),
                "reward": torch.tensor([r.value if r.valid else 0.0 for r in rewards], dtype=torch.float64),
                "valid": torch.tensor([r.valid for r in rewards]),
            },
            meta={
                "response": [part.text for part in parts],
                "finish": [c.finish.value for c in completions],
                "invalid": [r.why or None for r in rewards],
                "parts": [dict(r.parts) for r in rewards],
                "failed": [dict(r.failed) for r in rewards],
                "remark": [r.detail if r.valid else "" for r in rewards],
                "printed": [r.printed for r in rewards],
            },
        )
        return with_baseline(group, _greedy_sample(found[self.samples_per_prompt])) if self.greedy else group

    def _reward_request(self, prompt: Prompt, text: str, completion: Completion) -> RewardRequest:
        told = prompt.row.prompt
        chat = [{"role": "user", "content": told}] if isinstance(told, str) else told
        before = [] if not self.system_prompt else [{"role": "system", "content": self.system_prompt}]
        return RewardRequest(
            response=text,
            answer=prompt.row.answer,
            data_source=prompt.row.data_source,
            extra=prompt.row.extra,
            prompt=prompt.text,
            finish=completion.finish.value,
            prompt_ids=prompt.ids,
            response_ids=completion.ids,
            chat=[*before, *chat],
            prompt_messages=None if isinstance(told, str) else len(before) + len(chat),
            columns=prompt.row.columns,
        )


def packed(completion: Completion) -> Completion:
    """The same with its numbers side by side, as wide as samples have them or narrower: as lists, which they come as, they take
    eight times the memory."""
    return replace(
        completion,
        ids=array("i", completion.ids),
        logprobs=array("f", completion.logprobs),
        versions=array("i", completion.versions),
    )


def _greedy_sample(scored: "Scored") -> GreedySample:
    completion, reward = scored.completion, scored.scoring.result()
    return GreedySample(
        response=scored.text,
        ids=tuple(completion.ids),
        finish=completion.finish.value,
        reward=reward.value,
        invalid=reward.why or None,
        parts=dict(reward.parts),
        printed=reward.printed,
        versions=(min(completion.versions), max(completion.versions)),
    )


def _column(parts: Sequence[Sequence[float] | np.ndarray], dtype: type) -> torch.Tensor:
    """Pieces end to end, as a tensor."""
    return torch.from_numpy(np.concatenate([np.asarray(part, dtype=dtype) for part in parts]))


def sample_records(
    samples: Samples, prompts: Sequence[Prompt], *, step: int, kind: str, exact: bool = False
) -> list[dict[str, Any]]:
    """Samples as the run folder's records.

    Args:
        samples: of a step.
        prompts: all prompts of the source.
        step: that the records name.
        kind: of the records.
        exact: with what a run needs that trains on them once more.
    """
    records = []
    has_advantage = "advantage" in samples.rows
    failed = samples.meta.get("failed", [{}] * len(samples))
    remarks = samples.meta.get("remark", [""] * len(samples))
    printed = samples.meta.get("printed", [""] * len(samples))
    columns = zip(samples.column("ids"), samples.column("version"), samples.column("mask"), strict=True)
    rows = {name: samples.rows[name].tolist() for name in ("prompt", "group", "reward", "valid")}
    for i, (ids, versions, mask) in enumerate(columns):
        prompt = prompts[rows["prompt"][i]]
        own = prompt_length(mask)
        of_prompt = {
            "step": step,
            "kind": kind,
            "row": prompt.row.index,
            "group": rows["group"][i],
            "prompt": samples.meta["shown"][i] if "shown" in samples.meta else prompt.text,
            "prompt_ids": ids[:own].tolist(),
            "answer": prompt.row.answer,
            "data_source": prompt.row.data_source,
        }
        if (greedy := greedy_record(samples, i)) is not None:
            records.append({**of_prompt, **greedy})
        records.append(
            {
                **of_prompt,
                "response": samples.meta["response"][i],
                "response_ids": ids[own:].tolist(),
                "reward": rows["reward"][i] if rows["valid"][i] else None,
                "invalid": samples.meta["invalid"][i],
                "advantage": float(samples.rows["advantage"][i]) if has_advantage else None,
                "finish": samples.meta["finish"][i],
                "versions": list(version_range(versions, mask)),
                "parts": samples.meta["parts"][i],
                **({"failed": failed[i]} if failed[i] else {}),
                **({"remark": remarks[i]} if remarks[i] else {}),
                **({"printed": printed[i]} if printed[i] else {}),
                **(token_columns(samples, i, own) if exact else {}),
                **episode_fields(samples, i, own),
            }
        )
    return records
