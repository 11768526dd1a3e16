"""Functions that take lists: what they are called with, what their lists mean, what a call that fails costs. Real processes."""

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from meshloom.config.errors import RunFault, UserError
from meshloom.config.settings import DataSettings, RewardSettings
from meshloom.data.columns import Place, to_row
from meshloom.data.rows import Row, RowNames
from meshloom.loop.rewarding import open_rewards
from meshloom.loop.train import run_training
from meshloom.observe.records import read_metrics, read_samples
from meshloom.rewards.combined import Component, Computed, combine
from meshloom.rewards.outcome import InvalidReason, Reward, RewardRequest
from meshloom.rewards.pool import RewardPool
from tests.lesson_runs import train_settings, write_inputs

FUNCTIONS = '''
import asyncio, os, time
import numpy

def trl(prompts, completions, completion_ids, solution, note="none", **columns):
    told = [prompts, completions, completion_ids, solution, note, columns]
    return [{"score": len(completions), "remark": repr(told)} for _ in completions]

def verl(data_sources, solution_strs, ground_truths, extra_infos, bonus=0):
    for extra in extra_infos:
        extra["seen"] = extra.get("seen", 0) + 1
    told = [data_sources, solution_strs, ground_truths, extra_infos]
    return [{"score": bonus + (s == t), "remark": repr(told)} for s, t in zip(solution_strs, ground_truths)]

def odd(completions):
    """What the first completion asks for."""
    return {
        "list": lambda: [1, 2, 3],
        "tuple": lambda: (True, 2, 3),
        "array": lambda: numpy.array([1, 2, 3], dtype=numpy.float32),
        "lazy": lambda: (float(i) for i in (1, 2, 3)),
        "short": lambda: [1.0],
        "long": lambda: [1.0] * 4,
        "endless": lambda: iter(float, 1),
        "none": lambda: None,
        "number": lambda: 1.0,
        "dict": lambda: {"score": [1, 2, 3]},
        "text": lambda: "123",
        "raise": lambda: {}["x"],
        "hang": lambda: time.sleep(60),
        "exit": lambda: os._exit(3),
        "mixed": lambda: [1.0, float("nan"), None],
        "strange": lambda: [1.0, "1.0", numpy.array([1, 2])],
    }[completions[0]]()

def verl_none(solution_strs):
    return [None, 1.0]

loop = None
async def waits(completions):
    global loop
    is_first, loop = loop in (None, asyncio.get_running_loop()), asyncio.get_running_loop()
    await asyncio.gather(*[asyncio.to_thread(time.sleep, 0.01) for _ in range(30)])
    return [float(is_first)] * len(completions)

async def leaves(completions):
    """How many tasks there are."""
    asyncio.create_task(asyncio.sleep(1e6))
    return [float(len(asyncio.all_tasks()))] * len(completions)

async def ends(completions):
    async def end():
        raise SystemExit(3)
    await asyncio.gather(*[end() for text in completions if text == "end"], asyncio.sleep(0.001))
    return [1.0] * len(completions)

class Judge:
    async def __call__(self, completions, **columns):
        return [0.5] * len(completions)
judge = Judge()
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("groups") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def opened(file: Path, name: str, **settings: object) -> RewardPool:
    return RewardPool(RewardSettings(function=f"{file}:{name}", **{"workers": 1, "deadline_s": 20, **settings}))


@pytest.fixture(scope="module")
def odd(file: Path) -> Iterator[RewardPool]:
    with opened(file, "odd", deadline_s=2) as pool:
        yield pool


def ask(response: str, **fields: object) -> RewardRequest:
    given = {
        "answer": "7",
        "data_source": "d",
        "extra": {"k": 1},
        "prompt": "<user>Q</user>",
        "finish": "stop",
        "chat": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}],
        "columns": {"k": 1, "solution": "7", "prompt": "raw"},
        "response_ids": (1, 2),
    }
    return RewardRequest(response=response, **{**given, **fields})


def told(reward: Reward) -> list:
    return eval(reward.detail)


def test_a_function_of_trl_is_given_texts_and_columns_as_lists(file: Path) -> None:
    with opened(file, "trl", kwargs={"level": 2}) as pool:
        assert pool.takes_groups and pool.columns == ["solution"]
        rewards = pool.score([ask("a"), ask("b", answer="8", columns={"solution": "8", "note": "n"})])
    assert [reward.value for reward in rewards] == [2.0, 2.0]
    columns = {"k": [1, None], "level": 2}
    assert told(rewards[0]) == [["Q", "Q"], ["a", "b"], [[1, 2], [1, 2]], ["7", "8"], [None, "n"], columns]


def test_a_prompt_of_messages_makes_messages_of_completions(file: Path) -> None:
    """Of an episode they are all that came behind its first messages."""
    turns = [{"role": "assistant", "content": "call"}, {"role": "tool", "content": "4"}]
    opening = [{"role": "user", "content": "Q"}]
    with opened(file, "trl") as pool:
        rewards = pool.score(
            [ask("a", chat=opening, prompt_messages=1), ask("b", chat=[*opening, *turns], prompt_messages=1)]
        )
    prompts, completions, *_ = told(rewards[0])
    assert prompts == [opening, opening]
    assert completions == [
        [{"role": "assistant", "content": "a"}],
        [*turns, {"role": "assistant", "content": "b"}],
    ]


def test_a_function_of_verls_batch_manager_is_given_lists(file: Path) -> None:
    with opened(file, "verl", kwargs={"bonus": 3}) as pool:
        rewards = pool.score([ask("7"), ask("8")])
    assert [reward.value for reward in rewards] == [4.0, 3.0]
    assert told(rewards[0]) == [["d", "d"], ["7", "8"], ["7", "7"], [{"k": 1, "seen": 1}] * 2]


@pytest.mark.parametrize("kind", ["list", "tuple", "array", "lazy"])
def test_whatever_can_be_gone_through_is_a_list(odd: RewardPool, kind: str) -> None:
    assert [reward.value for reward in odd.score([ask(kind)] * 3)] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("kind", "reason", "said"),
    [
        ("short", InvalidReason.BAD_LIST, "odd returned a list of 1 for 3 samples"),
        ("long", InvalidReason.BAD_LIST, "odd returned a list of 4 for 3 samples"),
        ("endless", InvalidReason.BAD_LIST, "odd returned a list of more than 3 for 3 samples"),
        (
            "none",
            InvalidReason.BAD_LIST,
            "odd returned no list of 3 values but NoneType: None (a function without a return?)",
        ),
        ("number", InvalidReason.BAD_LIST, "odd returned no list of 3 values but float: 1.0"),
        ("dict", InvalidReason.BAD_LIST, "odd returned no list of 3 values but dict: {'score': [1, 2, 3]}"),
        ("text", InvalidReason.BAD_LIST, "odd returned no list of 3 values but str: '123'"),
        ("raise", InvalidReason.RAISED, "odd, called with 3 samples: "),
        ("hang", InvalidReason.DEADLINE, "odd, called with 3 samples: no result after 2 s"),
        ("exit", InvalidReason.DIED, "odd, called with 3 samples: the process ended with status 3"),
    ],
)
def test_a_call_that_fails_costs_its_own_group_and_names_the_function(
    odd: RewardPool, kind: str, reason: InvalidReason, said: str
) -> None:
    groups = [[odd.submit(ask(name)) for _ in range(3)] for name in ("list", kind, "list")]
    for group in groups:
        odd.begin(group)
    first, failed, last = ([scoring.result() for scoring in group] for group in groups)
    assert [reward.value for reward in (*first, *last)] == [1.0, 2.0, 3.0] * 2
    assert {(reward.value, reward.reason) for reward in failed} == {(None, reason)}
    assert all(reward.detail.startswith(said) for reward in failed)


def test_a_value_that_is_no_number_costs_its_own_sample(file: Path, odd: RewardPool) -> None:
    """None says that a sample is not this function's to judge, for TRL; in verl it is no number."""
    good, nan, skipped = odd.score([ask("mixed")] * 3)
    _, text, strange = odd.score([ask("strange")] * 3)
    assert good.value == 1.0
    assert nan.why == "not_a_number: odd, value 2 of 3: float: nan"
    assert skipped.why == "not_applicable: odd returned None"
    assert text.why == "not_a_number: odd, value 2 of 3: str: '1.0'"
    assert strange.reason is InvalidReason.NOT_A_NUMBER
    with opened(file, "verl_none") as pool:
        none, valid = pool.score([ask("a")] * 2)
    assert (none.reason, valid.value) == (InvalidReason.NOT_A_NUMBER, 1.0)


def test_calls_of_an_async_function_share_a_loop_and_leave_no_threads(file: Path) -> None:
    """Each call had a loop of its own, in which a client that the function keeps is of no use any more."""
    with opened(file, "waits") as pool:
        assert [r.value for _ in range(3) for r in pool.score([ask("a")] * 2)] == [1.0] * 6
    with opened(file, "judge") as pool:
        assert [reward.value for reward in pool.score([ask("a")] * 2)] == [0.5, 0.5]


def test_tasks_that_an_async_function_leaves_behind_are_bounded(file: Path) -> None:
    """They lived in the loop that calls share, each with its memory, as long as the run."""
    with opened(file, "leaves") as pool:
        found = [reward.value for _ in range(40) for reward in pool.score([ask("a")])]
    assert found[:2] == [2.0, 3.0] and max(found) < 40


def test_a_task_that_ends_the_loop_costs_its_own_group(file: Path) -> None:
    """What awaited it raised the same once more in the next call, which had nothing to do with it."""
    with opened(file, "ends") as pool:
        groups = [[pool.submit(ask(text))] for text in ("a", "end", "a", "a")]
        for group in groups:
            pool.begin(group)
        rewards = [scoring.result() for (scoring,) in groups]
    assert [reward.reason for reward in rewards] == [None, InvalidReason.RAISED, None, None]


def test_a_group_is_called_in_the_order_that_begins_it_and_what_is_never_begun_is_unfinished(file: Path) -> None:
    with opened(file, "trl") as pool:
        first, second, lost = (pool.submit(ask(name)) for name in "abc")
        pool.begin([second, first])
        assert told(first.result())[1] == ["b", "a"]
        assert lost.result().why == "unfinished: its group was never whole"
        pool.begin([lost, first])
        waiting = pool.submit(ask("d"))
    with pytest.raises(CancelledError):
        waiting.result(timeout=0)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(ask("e"))


def test_a_call_has_its_time_and_groups_are_scored_side_by_side(file: Path) -> None:
    with opened(file, "odd", workers=2, deadline_s=1) as pool:
        hung = [[pool.submit(ask("hang")) for _ in range(2)] for _ in range(2)]
        for group in hung:
            pool.begin(group)
        done = threading.Event()
        fine = [pool.submit(ask("list")) for _ in range(3)]
        pool.begin(fine)
        fine[-1].add_done_callback(lambda _: done.set())
        assert done.wait(60)
        assert [scoring.result().value for scoring in fine] == [1.0, 2.0, 3.0]
        assert {scoring.result().reason for group in hung for scoring in group} == {InvalidReason.DEADLINE}


SKIPPED = Reward(value=None, reason=InvalidReason.NOT_APPLICABLE, detail="f returned None")


def combined(*found: tuple[str, Reward, dict[str, object]]) -> Reward:
    scorer = Computed(lambda request: 0.0)
    return combine([(Component(name=name, scorer=scorer, **fields), reward) for name, reward, fields in found])


def test_a_component_that_does_not_apply_is_left_out_of_the_sum() -> None:
    found = combined(("a", Reward(value=2.0), {"weight": 0.5}), ("b", SKIPPED, {"weight": 3.0, "fallback": 9.0}))
    assert (found.value, found.parts) == (1.0, {"a": 2.0})
    assert found.failed == {"b": "not_applicable: f returned None"}


def test_a_sample_that_nothing_applies_to_is_invalid_and_no_zero() -> None:
    penalty = ("overlong", Reward(value=-0.5), {"judges": False})
    logged = ("c", Reward(value=1.0), {"weight": 0.0})
    found = combined(("a", SKIPPED, {}), ("b", SKIPPED, {}), logged, penalty)
    assert found.why == "not_applicable: the sample is for none of a, b to judge"
    broken = Reward(value=None, reason=InvalidReason.RAISED, detail="no")
    assert combined(("a", SKIPPED, {}), ("b", broken, {})).why == "raised: b: no"


def test_columns_are_named_as_the_data_name_them() -> None:
    row = Row(index=0, prompt="p", answer="7", answer_name="solution", data_source="s", extra={"k": 1})
    assert row.columns == {"k": 1, "data_source": "s", "solution": "7"}
    place = Place("rows.jsonl", "line", 1)
    given = {"prompt": "p", "meta": {"gold": "7"}, "k": 1}
    assert to_row(given, 0, place, DataSettings(answer_column="meta.gold")).columns["gold"] == "7"
    verl = {"prompt": "p", "reward_model": {"ground_truth": "7"}, "data_source": "s", "extra_info": {"k": 1}}
    assert to_row(verl, 0, place, DataSettings()).columns == {"k": 1, "data_source": "s", "ground_truth": "7"}
    bare = Row(index=1, prompt="p", extra={"k": 2})
    assert bare.columns == {"k": 2}
    assert RowNames.of([row, bare]) == RowNames(sources=frozenset({"s", ""}), columns=frozenset({"k"}))


def test_a_column_that_not_all_rows_have_is_refused_before_the_first_sample(file: Path, tmp_path: Path) -> None:
    settings = train_settings(tmp_path, tmp_path / "run", f"reward.function={file}:trl")
    names = RowNames(columns=frozenset({"answer", "solutions"}))
    with pytest.raises(UserError) as error, open_rewards(settings, names, None, None):
        raise AssertionError("the run began")
    assert "takes 'solution', and not all rows have such a column" in error.value.what
    assert "solutions, answer" in error.value.why
    assert "the name of its column" in error.value.fix
    with open_rewards(settings, RowNames(columns=frozenset({"solution"})), None, None) as scorer:
        assert scorer.takes_groups


def test_a_function_without_a_column_says_so_for_each_of_its_groups(file: Path) -> None:
    with opened(file, "trl") as pool:
        (reward,) = pool.score([ask("a", columns={"k": 1})])
    assert "trl, called with 1 sample" in reward.detail and "no column 'solution'; it has: k" in reward.detail


OWN = """\
def digits(prompts, completions, answer, **columns):
    assert len(set(map(str, prompts))) == 1, "a group is of one prompt"
    print("called with", len(completions), "of", answer[0])
    texts = [messages[-1]["content"] for messages in completions]
    return [sum(c.isdigit() for c in text) / (1 + max(map(len, texts))) for text in texts]

async def even(completions, **columns):
    return [None if len(messages[0]["content"]) % 2 else 1.0 for messages in completions]

def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
    return [{"score": float(len(text)), "size": len(solution_strs)} for text in solution_strs]

def short(completions):
    print("of", len(completions))
    return [1.0]
"""


def test_a_run_is_scored_by_several_functions_that_take_lists(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that always applies, one that does not, and one of verl's; a call has the samples of a group."""
    inputs = write_inputs(tmp_path / "inputs")
    (inputs / "own.py").write_text(OWN)
    given = ["reward.function=null", "batch.steps=2", "rollout.stop=[a,b,c,d,e]", "validation.success_component=digits"]
    for name, function, weight in (("digits", "digits", 2.0), ("even", "even", 0.5), ("size", "compute_score", 0.0)):
        path = f"reward.components.{name}"
        given += [f"{path}.function={inputs / 'own.py'}:{function}", f"{path}.weight={weight}"]
    settings = train_settings(inputs, tmp_path / "run", *given)
    assert run_training(settings, resume=False) == 0
    samples = read_samples(tmp_path / "run")
    each = settings.batch.samples_per_prompt
    for sample in samples:
        parts, is_odd = sample["parts"], len(sample["response"]) % 2 == 1
        assert sample["reward"] == pytest.approx(2 * parts["digits"] + (0 if is_odd else 0.5))
        assert sample.get("failed", {}) == ({"even": "not_applicable: even returned None"} if is_odd else {})
        assert parts["size/size"] == (each if sample["kind"] == "train" else 1)
    assert 0 < sum("failed" in sample for sample in samples) < len(samples)
    trained = [sample for sample in samples if sample["kind"] == "train"]
    told = [sample["printed"] for sample in trained if "printed" in sample]
    assert len(told) == len(trained) // each
    assert all(f"digits: called with {each} of" in text for text in told)
    metrics = read_metrics(tmp_path / "run")[-1]["metrics"]
    assert metrics["reward_invalid"] == metrics["reward/even/invalid_share"] == 0
    out = "".join(capfd.readouterr())
    assert "called with" not in out
    assert out.count("samples.jsonl") == 1


def test_a_list_of_another_length_ends_a_run_with_one_clear_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What was printed over a step that is never written is in the error: the user was sent to a file that is not there."""
    inputs = write_inputs(tmp_path / "inputs")
    (inputs / "own.py").write_text(OWN)
    settings = train_settings(
        inputs, tmp_path / "run", f"reward.function={inputs / 'own.py'}:short", "data.validation=null"
    )
    with pytest.raises(RunFault) as fault:
        run_training(settings, resume=False)
    each = settings.batch.samples_per_prompt
    assert fault.value.what == "100% of this step's rewards are invalid"
    assert f"bad_list: short returned a list of 1 for {each} samples; it printed: of {each}" in fault.value.why
    assert "samples.jsonl" not in "".join(capfd.readouterr())
