"""Episodes with an engine: what is trained on, what fails, and whole runs."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from meshloom.config.episode_settings import EnvironmentSettings
from meshloom.config.errors import RunFault, UserError
from meshloom.config.load import load_settings
from meshloom.config.settings import AlgorithmSettings, EvalSettings, TrainSettings
from meshloom.data.rows import Prompt, Row
from meshloom.environments.chat import ChatRenderer
from meshloom.environments.pool import EnvironmentPool
from meshloom.loop.build import build_actor, decoder, texts_decoder
from meshloom.loop.collect import sample_records
from meshloom.loop.component_watch import component_metrics
from meshloom.loop.episodes import Environments, EpisodeCollector
from meshloom.loop.evaluate import run_evaluation
from meshloom.loop.invalid_rewards import check_rewards
from meshloom.loop.objective import with_advantages
from meshloom.loop.saved_samples import read_saved
from meshloom.loop.spread import spread_of
from meshloom.loop.stage import Draw, Spread
from meshloom.loop.step_metrics import batch_metrics
from meshloom.loop.train import run_training
from meshloom.loop.validate import Validation, validation_metrics
from meshloom.observe.records import read_metrics, read_samples
from meshloom.observe.timing import PhaseClock
from meshloom.rewards.combined import Combination
from meshloom.rollout.protocol import SamplingParams
from meshloom.rollout.torch_engine import TorchEngine
from meshloom.samples import Samples, concat
from meshloom.samples.episodes import joined
from meshloom.train.model import MicrobatchBound
from tests.lesson_runs import assert_same_run, train_settings, write_inputs
from tests.test_environments import STRIPPING

GAME = """
import os

class Game:
    def reset(self, task):
        self.number, self.turns = task.extra["number"], 0
        if self.number == 3:
            raise RuntimeError("no game today")
        return "say"
    def step(self, turn):
        self.turns += 1
        if self.number == 1:
            raise ValueError("lost")
        if self.number in (4, 5):
            return "on", 0.0 if self.number == 5 and self.turns == 1 else None, self.turns == 3
        return f"turn {self.turns}", float(len(turn.text) % 3), self.turns == 3
    def close(self):
        pass

class Gym:
    def reset(self, seed=None, options=None):
        self.turns, self.seed = 0, seed
        return f"begin {seed % 10}", {}
    def step(self, text):
        self.turns += 1
        return "more", float("e" in text) + self.seed % 2, False, self.turns >= 2, {"letters": len(text)}
"""
TOOLS = '''
def half(number: str) -> str:
    """Halves.

    Args:
        number: a digit.
    """
    return str(int(number) // 2)
'''


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    (folder / "game.py").write_text(GAME)
    (folder / "tools.py").write_text(TOOLS)
    return folder


@pytest.fixture(scope="module")
def pool(inputs: Path) -> Iterator[EnvironmentPool]:
    settings = EnvironmentSettings(custom=f"{inputs}/game.py:Game", workers=1)
    with EnvironmentPool(settings) as pool:
        yield pool


def _prompts() -> list[Prompt]:
    return [Prompt(row=Row(index=n, prompt="", extra={"number": n}), ids=[1], text="") for n in range(10)]


def collected(
    inputs: Path,
    pool: EnvironmentPool,
    numbers: list[int],
    template: str | None = None,
    *,
    greedy: bool = False,
    params: SamplingParams | None = None,
    **bounds: Any,
) -> Samples:
    """Three samples of each game; turns of six tokens or fewer, of which most end by themselves."""
    model = build_actor(
        train_settings(inputs, inputs / "x").model, None, MicrobatchBound(500), device="cpu", seed=0, checkpoint=None
    )
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    tokenizer.chat_template = template or tokenizer.chat_template
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    letters = tokenizer.convert_tokens_to_ids(["e", "=", "7"])
    with torch.no_grad():
        model.module.get_input_embeddings().weight[[end, *letters]] *= 3
    settings = pool.settings.model_copy(update=bounds)
    renderer = ChatRenderer(tokenizer, end)
    prompts = _prompts()
    collector = EpisodeCollector(
        engine=TorchEngine(model.module, eos_ids=(end,), kv_cache_bytes=10**7, decode=decoder(tokenizer)),
        scorer=Combination(()),
        prompts=prompts,
        decode=texts_decoder(tokenizer),
        params=params or SamplingParams(max_tokens=bounds.pop("longest", 100)),
        samples_per_prompt=3,
        greedy=greedy,
        seed=5,
        environments=Environments(
            settings=settings, pool=pool, renderer=renderer, system_prompt=None, max_prompt_tokens=64, judge_alone=True
        ),
    )
    collector.check()
    draws = [Draw(10 + n, n) for n in numbers]
    found = collector.collect(draws, deadline_s=100, clock=PhaseClock())
    assert (found.retried, found.dropped) == (0, ())
    samples = concat(found.groups)
    assert sample_records(samples, prompts, step=1, kind="train")
    return samples


def test_an_episode_is_one_sample_with_a_mask(inputs: Path, pool: EnvironmentPool) -> None:
    samples = collected(inputs, pool, [0, 2])
    assert len(samples) == 6 and bool(samples["valid"].all())
    assert int(samples["turns"].max()) > 1
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    for i, (ids, mask, reward) in enumerate(zip(*map(samples.column, ("ids", "mask", "turn_reward")), strict=True)):
        said = [m["content"] for m in samples.meta["messages"][i] if m["role"] == "assistant"]
        assert tokenizer.decode(ids[mask]).replace("<|im_end|>", "") == "".join(said)
        between = "\n<|im_start|>user\nturn {}<|im_end|>\n<|im_start|>assistant\n"
        shown = samples.meta["shown"][i] + "".join(between.format(turn) for turn in range(1, len(said)))
        assert tokenizer.decode(ids[~mask]) == shown.replace("\n", " ") or tokenizer.decode(ids[~mask]) == shown
        assert bool(mask[-1]) and len(said) == int(samples["turns"][i])
        assert float(reward.sum()) == float(samples["reward"][i])
        assert not bool(reward[~mask].any()), "a turn's reward stands on a token of the model"
    assert not bool(samples["sampler_logprob"][~samples["mask"]].any())
    assert bool((samples["sampler_logprob"][samples["mask"]] < 0).all())


def test_episodes_repeat_themselves(inputs: Path, pool: EnvironmentPool) -> None:
    one, other = (collected(inputs, pool, numbers) for numbers in ([0, 2], [2, 0]))
    assert torch.equal(one["ids"], concat([other.select([3, 4, 5]), other.select([0, 1, 2])])["ids"])


def test_a_greedy_episode_is_the_baseline_of_the_others(inputs: Path, pool: EnvironmentPool) -> None:
    """It is what an episode is that is sampled at temperature 0, and no sample; the others are what they are without it."""
    samples = collected(inputs, pool, [0, 2], greedy=True)
    alone = collected(inputs, pool, [0, 2], params=SamplingParams(max_tokens=100, temperature=0))
    assert torch.equal(samples["ids"], collected(inputs, pool, [0, 2])["ids"])
    assert samples["greedy_reward"].tolist() == alone["reward"].tolist()
    records = [r for r in sample_records(samples, _prompts(), step=1, kind="train") if r["kind"] == "greedy"]
    expected = sample_records(alone, _prompts(), step=1, kind="train")[::3]
    for name in ("prompt", "response_ids", "messages", "turns", "own", "reward", "finish"):
        assert [record[name] for record in records] == [record[name] for record in expected]
    assert any(record["turns"] > 1 for record in records)
    judged = with_advantages(samples, AlgorithmSettings(advantage="remax"))
    first = [float(own[mask][0]) for own, mask in zip(*map(judged.column, ("advantages", "mask")), strict=True)]
    assert first == pytest.approx((samples["reward"] - samples["greedy_reward"]).tolist())
    failed = collected(inputs, pool, [1], greedy=True)
    with pytest.raises(RunFault, match="no_baseline|environment_raised") as fault:
        check_rewards(failed, train_settings(inputs, inputs / "x", f"environment.custom={inputs}/game.py:Game"))
    assert fault.value.where == "environment" and not bool(failed["valid"].any())


def test_an_environment_that_fails_makes_its_sample_invalid(inputs: Path, pool: EnvironmentPool) -> None:
    samples = collected(inputs, pool, [0, 1, 3])
    assert samples["valid"].tolist() == [True] * 3 + [False] * 6
    lost, never = samples.meta["invalid"][3], samples.meta["invalid"][8]
    assert lost.startswith("environment_raised: ") and "ValueError: lost" in lost
    assert "RuntimeError: no game today" in never
    masks = samples.column("mask")
    assert bool(masks[3].any()), "what the model said is there"
    assert not bool(masks[8].any()), "it was never asked"
    judged = with_advantages(samples, AlgorithmSettings())
    assert not bool(judged["advantages"][samples.lengths[:3].sum() :].any())


def test_an_episode_without_any_reward_is_invalid_and_a_reward_of_0_is_one(inputs: Path, pool: EnvironmentPool) -> None:
    """An environment that never said a reward gave 0, as if every episode were a failure."""
    samples = collected(inputs, pool, [4, 5])
    assert samples["valid"].tolist() == [False] * 3 + [True] * 3
    reason, turns = samples.meta["invalid"][0], int(samples["turns"][0])
    assert reason.startswith(f"environment_no_reward: no reward in {turns} turn") and "0.0" in reason
    assert samples["reward"].tolist() == [0.0] * 6


def test_all_turns_together_are_bounded(inputs: Path, pool: EnvironmentPool) -> None:
    samples = collected(inputs, pool, [0, 2], max_turn_tokens=5, longest=60)
    after = [int(mask.sum()) for mask in samples.column("mask")]
    assert max(after) <= 15
    one = collected(inputs, pool, [0], max_turns=1)
    assert set(one["turns"].tolist()) == {1}


def test_rewritten_history_is_refused_or_split(inputs: Path, pool: EnvironmentPool) -> None:
    """The model's turns have = in them, and this template drops what stands before it."""
    refused = collected(inputs, pool, [0, 2], template=STRIPPING)
    reasons = [reason for reason in refused.meta["invalid"] if reason is not None]
    assert reasons and all(reason.startswith("history_rewritten: ") for reason in reasons)
    split = collected(inputs, pool, [0, 2], template=STRIPPING, rewritten_history="split")
    assert bool(split["valid"].all()) and len(split) > 6
    judged = with_advantages(split, AlgorithmSettings(advantage="grpo"))
    per_episode: dict[tuple[int, int], set[float]] = {}
    for group, episode, advantage in zip(
        *(judged[name].tolist() for name in ("group", "episode", "advantage")), strict=True
    ):
        per_episode.setdefault((group, episode), set()).add(round(advantage, 9))
    assert len(per_episode) == 6 and all(len(found) == 1 for found in per_episode.values())
    for group in (10, 12):
        of_group = [next(iter(found)) for (number, _), found in per_episode.items() if number == group]
        assert abs(sum(of_group)) < 1e-6, "an episode counts once in its group, however many samples it has"


def test_an_episode_of_several_samples_counts_once(inputs: Path) -> None:
    """Long episodes that were split weighed more in accuracy, reward and the share of invalid ones."""
    rows = [(0, 0, 1.0, True), (0, 0, 1.0, True), (0, 0, 1.0, True), (0, 1, 0.0, True), (1, 0, 0.0, False)]
    group, episode, reward, valid = zip(*rows, strict=True)
    split = Samples(
        torch.full((5,), 4),
        {"ids": torch.zeros(20, dtype=torch.int64), "mask": torch.tensor([False, False, True, True] * 5)},
        {
            "group": torch.tensor(group),
            "episode": torch.tensor(episode),
            "reward": torch.tensor(reward, dtype=torch.float64),
            "valid": torch.tensor(valid),
            **{name: torch.ones(5, dtype=torch.int64) for name in ("turns", "tool_calls", "tool_errors")},
        },
        {
            "finish": ["stop"] * 5,
            "invalid": [None if ok else "environment_raised: x" for ok in valid],
            "parts": [{"a": value} if ok else {} for value, ok in zip(reward, valid, strict=True)],
            "failed": [{} if ok else {"a": "raised: x"} for ok in valid],
        },
    )
    found = validation_metrics(split, threshold=1.0)
    assert (found["accuracy"], found["reward_mean"], found["reward_invalid"]) == (0.5, 0.5, 1.0)
    assert (found["response_tokens_mean"], found["episodes"]) == (2.0, 3.0)
    step = batch_metrics(split, threshold=1.0)
    assert (step["solved_share"], step["reward_mean"], step["reward_invalid"], step["reward/a"]) == (0.5, 0.5, 1.0, 0.5)
    assert (step["samples"], step["reward_invalid/environment_raised"]) == (5, 1.0)
    assert component_metrics(split, ("a",))["reward/a"] == 0.5
    assert component_metrics(split, ("a",))["reward/a/invalid_share"] == pytest.approx(1 / 3)
    settings = train_settings(inputs, inputs / "none", "reward.max_invalid_share=0.3")
    with pytest.raises(RunFault, match="33% of this step's rewards are invalid"):
        check_rewards(split, settings)
    assert spread_of(split.select([0, 1, 2]), settings) is Spread.TOO_FEW
    settings = train_settings(inputs, inputs / "none", "reward.max_invalid_share=0.3", "environment.custom=g.py:G")
    with pytest.raises(RunFault, match="(?s)where: environment\n.*mend the environment, or raise"):
        check_rewards(split, settings)


def test_records_of_an_episode_say_what_trains_again_without_log_probs(inputs: Path, pool: EnvironmentPool) -> None:
    """A file without them had no rewards of turns, and took each sample of an episode for one of its own."""
    samples = collected(inputs, pool, [0, 2], template=STRIPPING, rewritten_history="split")
    prompts = [Prompt(row=Row(index=n, prompt="", extra={}), ids=[1], text="") for n in range(10)]
    records = sample_records(samples, prompts, step=1, kind="train")
    assert [record["episode"] for record in records] == samples["episode"].tolist()
    found, told = Validation({}, records), joined(samples)
    assert len(records) > len(told) and found.invalid == told.meta["invalid"], "an episode counts once"
    for record, rewards, mask in zip(records, samples.column("turn_reward"), samples.column("mask"), strict=True):
        assert record.get("turn_rewards", [0.0]) == rewards[len(record["prompt_ids"]) :].tolist() or not rewards.any()
        assert sum(stop - start for start, stop in record["own"]) == int(mask.sum())
    assert any("turn_rewards" in record for record in records)
    assert "logprobs" not in records[0]


def test_episodes_of_a_file_are_compared_with_their_text(inputs: Path, pool: EnvironmentPool, tmp_path: Path) -> None:
    """They were not: a file of another tokenizer was trained on."""
    samples = collected(inputs, pool, [0, 2], template=STRIPPING, rewritten_history="split")
    prompts = [Prompt(row=Row(index=n, prompt="", extra={}), ids=[1], text="") for n in range(10)]
    records = sample_records(samples, prompts, step=1, kind="train")
    file = tmp_path / "samples.jsonl"
    shape = ("batch.samples_per_prompt=3", "batch.prompts_per_step=2", "batch.prompts_per_update=2")
    longest = ("data.max_prompt_tokens=400", "rollout.max_response_tokens=400", "batch.tokens_per_microbatch=900")
    settings = train_settings(inputs, tmp_path / "run", *shape, *longest, f"rollout.from_samples={file}")
    decode = texts_decoder(AutoTokenizer.from_pretrained(inputs / "model"))
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    saved = read_saved(settings, decode)
    assert saved is not None
    again = concat(saved.steps[0])
    assert torch.equal(again["turn_reward"], samples["turn_reward"]) and torch.equal(again["mask"], samples["mask"])
    assert again["episode"].tolist() == samples["episode"].tolist()
    other = [{**record, "response": record["response"] + "?"} for record in records]
    file.write_text("".join(json.dumps(record) + "\n" for record in other))
    with pytest.raises(UserError, match="not its text"):
        read_saved(settings, decode)


def tool_run(inputs: Path, run_dir: Path, *changes: str) -> Path:
    pattern = "environment.tool_pattern='(?P<arguments>[0-9])'"
    settings = train_settings(
        inputs,
        run_dir,
        f"environment.tools=[{inputs}/tools.py:half]",
        "environment.tool_format=regex",
        pattern,
        "environment.max_turns=3",
        "environment.max_turn_tokens=12",
        "environment.workers=1",
        "environment.lockstep=true",
        "rollout.max_response_tokens=90",
        "batch.tokens_per_microbatch=400",
        "batch.steps=4",
        "checkpoint.keep_last=9",
        *changes,
    )
    assert run_training(settings, resume=False) == 0
    return run_dir


def test_a_run_with_tools_trains_on_what_was_sampled_and_can_be_resumed(inputs: Path, tmp_path: Path) -> None:
    run = tool_run(inputs, tmp_path / "run")
    steps = [record["metrics"] for record in read_metrics(run) if record["kind"] == "train"]
    assert all(metrics["sampler_gap"] < 1e-5 for metrics in steps), "sampler and trainer see the same tokens"
    assert sum(metrics.get("tool_calls_mean", 0) for metrics in steps) > 0
    assert all(metrics["prompt_tokens_reused"] > 0 for metrics in steps if metrics["turns_mean"] > 1)
    samples = [record for record in read_samples(run) if record["tool_calls"] and record["turns"] > 1]
    assert samples
    for record in samples:
        roles = [message["role"] for message in record["messages"]]
        assert roles[:2] == ["user", "assistant"] and "tool" in roles
        assert record["own"][0][0] == 0 and record["own"][-1][1] == len(record["response_ids"])
        assert len(record["own"]) == record["turns"]
    assert any(record["kind"] == "validation" for record in read_samples(run))
    half = tmp_path / "half"
    shutil.copytree(run, half)
    for later in (3, 4):
        shutil.rmtree(half / "checkpoints" / f"step-{later:06d}")
    again = load_settings(TrainSettings, half / "settings.yaml", [f"run_dir={half}"])
    assert run_training(again, resume=True) == 0
    assert_same_run(run, half, only_last=True)


@pytest.mark.parametrize("advantage", ["reinforce_plus_plus", "remax"])
def test_episodes_of_a_file_make_the_same_weights(inputs: Path, tmp_path: Path, advantage: str) -> None:
    """Masks, rewards of turns, which samples are of one episode and greedy episodes come back."""
    exact = "logging.sampler_logprobs=true"
    changes = ("batch.steps=2", "data.validation=null", exact, f"algorithm.advantage={advantage}")
    first = tool_run(inputs, tmp_path / "first", *changes)
    again = tool_run(inputs, tmp_path / "again", *changes, f"rollout.from_samples={first}")
    files = [sorted((run / "checkpoints").glob("step-*"))[-1] / "model/model.safetensors" for run in (first, again)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert [r["own"] for r in read_samples(again)] == [r["own"] for r in read_samples(first)]
    greedy = [[r["messages"] for r in read_samples(run) if r["kind"] == "greedy"] for run in (first, again)]
    assert greedy[0] == greedy[1] and bool(greedy[0]) is (advantage == "remax")


def test_a_gym_run_learns_from_rewards_of_its_turns(inputs: Path, tmp_path: Path) -> None:
    tools = ("environment.tools=[]", "environment.tool_format=hermes", "environment.tool_pattern=null")
    rows = ("data.train.files=[]", "data.train.episodes=6", "data.validation.files=[]", "data.validation.episodes=2")
    own = (f"environment.gym={inputs}/game.py:Gym", "reward.function=null", "batch.steps=2")
    run = tool_run(inputs, tmp_path / "gym", *tools, *rows, *own, "algorithm.advantage=reinforce_plus_plus")
    records = list(read_samples(run))
    assert {record["data_source"] for record in records} == {"episodes"}
    assert all(record["prompt"].startswith("<|im_start|>user\nbegin ") for record in records)
    for record in records:
        assert record["reward"] == record["parts"]["environment"]
    train = [record for record in records if record["kind"] == "train"]
    by_group = {record["group"]: record["prompt"] for record in train}
    assert all(record["prompt"] == by_group[record["group"]] for record in train), "a group shares its seed"


def test_reasoning_gym_gives_the_same_as_an_environment_and_as_a_source(inputs: Path, tmp_path: Path) -> None:
    source = ("data.train.files=[]", "data.train.reasoning_gym=chain_sum", "data.train.size=6", "data.validation=null")
    plain = ("reward.function=null", "batch.steps=2", "data.max_prompt_tokens=200", "batch.tokens_per_microbatch=400")
    runs = {}
    for name, more in {
        "source": (),
        "environment": ("environment.reasoning_gym=true", "environment.workers=1"),
    }.items():
        settings = train_settings(inputs, tmp_path / name, *source, *plain, *more)
        assert run_training(settings, resume=False) == 0
        runs[name] = [
            (r["group"], r["prompt_ids"], r["response_ids"], r["reward"]) for r in read_samples(tmp_path / name)
        ]
    assert runs["source"] == runs["environment"]


def test_an_evaluation_uses_the_environment(inputs: Path, tmp_path: Path) -> None:
    settings = EvalSettings.model_validate(
        {
            "run_dir": str(tmp_path / "eval"),
            "device": "cpu",
            "model": {"path": str(inputs / "model")},
            "data": {"validation": {"episodes": 3}, "max_prompt_tokens": 64},
            "environment": {"gym": f"{inputs}/game.py:Gym", "workers": 1, "max_turn_tokens": 10},
            "rollout": {"max_response_tokens": 60},
        }
    )
    assert run_evaluation(settings) == 0
    (record,) = read_metrics(tmp_path / "eval")
    assert record["metrics"]["episodes"] == 3


@pytest.mark.slow
def test_over_devices_episodes_are_those_of_one_process(inputs: Path, tmp_path: Path) -> None:
    """Two replicas, each with its share of the turns; with turns of all episodes together and each as soon as it can be."""
    own = (f"environment.gym={inputs}/game.py:Gym", "reward.function=null", "batch.steps=2", "validation.every_steps=2")
    rows = ("data.train.files=[]", "data.train.episodes=6", "data.validation.files=[]", "data.validation.episodes=2")
    tools = ("environment.tools=[]", "environment.tool_format=hermes", "environment.tool_pattern=null")
    found = {}
    for name, more in {
        "one": (),
        "two": ("cluster.devices_per_node=2",),
        "apart": ("cluster.devices_per_node=2", "environment.lockstep=false"),
    }.items():
        run = tool_run(inputs, tmp_path / name, *tools, *rows, *own, *more)
        found[name] = [(r["kind"], r["group"], r["response_ids"], r["reward"]) for r in read_samples(run)]
    assert found["one"] == found["two"] == found["apart"]


LISTS = """
def lists(prompts, completions, number, completion_ids, **columns):
    print(len(completions), "episodes")
    assert all(prompt[-1]["role"] == "user" and prompt[-1]["content"].startswith("begin") for prompt in prompts)
    for messages in completions:
        assert [message["role"] for message in messages] in (["assistant"], ["assistant", "user", "assistant"])
    return [None if number[0] % 2 else len(completions) + len(messages[0]["content"]) / 100 for messages in completions]
"""


def test_a_function_that_takes_lists_judges_the_episodes_of_a_group(inputs: Path, tmp_path: Path) -> None:
    """A completion is what came behind the first messages; where it returns None the environment's own rewards are left."""
    (inputs / "lists.py").write_text(LISTS)
    tools = ("environment.tools=[]", "environment.tool_format=hermes", "environment.tool_pattern=null")
    rows = ("data.train.files=[]", "data.train.episodes=6", "data.validation=null")
    own = (f"environment.gym={inputs}/game.py:Gym", f"reward.function={inputs}/lists.py:lists", "batch.steps=1")
    run = tool_run(inputs, tmp_path / "gym", *tools, *rows, *own, "algorithm.recipe=remax", "rollout.stop=[a,b,c,d,e]")
    records = list(read_samples(run))
    train = [record for record in records if record["kind"] == "train"]
    greedy = [record for record in records if record["kind"] == "greedy"]
    each = len(train) // len(greedy)
    assert {record["row"] % 2 for record in train} == {0, 1}
    for record in records:
        said = next(message["content"] for message in record["messages"] if message["role"] == "assistant")
        judged = 0.0 if record["row"] % 2 else each + 1 + len(said) / 100
        assert record["reward"] == pytest.approx(judged + record["parts"]["environment"])
    assert [r["printed"] for r in train if "printed" in r][-1] == f"{each + 1} episodes"
    assert sum("printed" in record for record in records) == len(greedy)
