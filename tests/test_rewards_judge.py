"""A generative judge against a real service on this machine, one that misbehaves."""

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from meshloom.config.errors import UserError
from meshloom.config.reward_settings import JudgeSettings
from meshloom.loop.train import run_training
from meshloom.observe.records import read_metrics
from meshloom.plan.build import build_plan
from meshloom.rewards.judge import Judge, seconds_to_wait
from meshloom.rewards.judging import Question, read_number
from meshloom.rewards.outcome import InvalidReason, Reward, RewardRequest
from meshloom.rewards.replies import KeptReplies, Reply
from tests.judge_service import Service, answer, completion, judge_service
from tests.lesson_runs import train_settings, write_inputs

KEY = "sk-do-not-write-me"


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with judge_service() as running:
        yield running


def ask(response: str = "it is 7", **fields: object) -> RewardRequest:
    given = {
        "answer": "7",
        "data_source": "sums",
        "extra": {"level": 3},
        "prompt": "<user>3+4=",
        "finish": "stop",
        "chat": [{"role": "system", "content": "be short"}, {"role": "user", "content": "3+4="}],
    }
    return RewardRequest(response=response, **(given | fields))


def settings_of(service: Service, **fields: object) -> JudgeSettings:
    return JudgeSettings(**({"url": service.url, "model": "grader", "backoff_s": 0.01, "use_cache": False} | fields))


def judged(
    service: Service, *responses: str, deadline_s: float = 20.0, kept: Path | None = None, **fields: object
) -> tuple[list[Reward], dict[str, float]]:
    with Judge("quality", settings_of(service, **fields), deadline_s=deadline_s, kept=kept) as judge:
        waiting = [judge.submit(ask(response)) for response in responses or ("it is 7",)]
        return [one.result(timeout=60) for one in waiting], judge.take_counts()


def test_a_sample_gets_the_number_of_the_reply(service: Service) -> None:
    service.text = lambda body: f"Fine.\nScore: {len(body['messages'][1]['content'])}"
    settings = {"system": "You grade.", "prompt": "{{ question }}|{{ response }}|{{ answer }}|{{ extra.level }}"}
    rewards, counts = judged(
        service, highest=None, scale=2.0, arguments={"seed": 1}, price_per_million_prompt_tokens=3.0, **settings
    )
    sent = service.asked[0]
    assert sent.path == "/v1/chat/completions"
    assert [message["content"] for message in sent.body["messages"]] == ["You grade.", "3+4=|it is 7|7|3"]
    assert (sent.body["model"], sent.body["temperature"], sent.body["max_tokens"]) == ("grader", 0.0, 1024)
    assert sent.body["seed"] == 1
    assert rewards[0].value == len("3+4=|it is 7|7|3") / 2.0
    assert counts == {
        "requests": 1.0,
        "requests_repeated": 0.0,
        "replies_kept": 0.0,
        "prompt_tokens": 10.0,
        "completion_tokens": 4.0,
        "cost": 30e-6,
    }


def test_the_default_template_names_question_answer_and_response() -> None:
    text = Question(JudgeSettings(url="http://x/v1", model="m")).body(ask())["messages"][0]["content"]
    assert all(part in text for part in ("3+4=", "it is 7", "Reference answer:\n7", "Score: N"))
    without = Question(JudgeSettings(url="http://x/v1", model="m")).body(ask(answer=None))["messages"][0]["content"]
    assert "Reference answer" not in without


@pytest.mark.parametrize(
    ("text", "fields", "wanted"),
    [
        ("Score: 7", {}, 0.7),
        ("score = 2, no: **Score:** 9.5", {}, 0.95),
        ("I cannot say", {}, None),
        ("Score: 11", {}, None),
        ("Score: -1", {}, None),
        ("Score: -1", {"lowest": None}, -0.1),
        ('first {"score": 1} then {"a": {"score": 4}}', {"parse": "json", "field": "a.score"}, 0.4),
        ('```json\n{"score": 10, "why": "{}"}\n```', {"parse": "json"}, 1.0),
        ('{"score": "high"}', {"parse": "json"}, None),
        ('{"score": true}', {"parse": "json"}, None),
        ('{"score": 5', {"parse": "json"}, None),
        ('{"score": NaN}', {"parse": "json"}, None),
        ("", {}, None),
    ],
)
def test_a_reply_without_the_number_gives_none(text: str, fields: dict, wanted: float | None) -> None:
    found = read_number(text, JudgeSettings(url="http://x/v1", model="m", **fields))
    assert found.value == (None if wanted is None else pytest.approx(wanted))
    assert found.reason is (InvalidReason.NO_ANSWER if wanted is None else None)


Act = Callable[[BaseHTTPRequestHandler, int], bool]


def hang_up(handler: BaseHTTPRequestHandler, number: int) -> bool:
    handler.close_connection = True
    handler.connection.close()
    return True


def half(handler: BaseHTTPRequestHandler, number: int) -> bool:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    return hang_up(handler, number)


FAULTS: dict[str, Act] = {
    "429": lambda handler, number: answer(handler, 429, b"slow down"),
    "500": lambda handler, number: answer(handler, 500, b"oops"),
    "closes": hang_up,
    "half": half,
    "no JSON": lambda handler, number: answer(handler, 200, b"<html>"),
    "no choices": lambda handler, number: answer(handler, 200, b'{"choices": []}'),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_service_that_fails_at_times_is_asked_again(service: Service, fault: str) -> None:
    service.act = lambda handler, number: number < 2 and FAULTS[fault](handler, number)
    rewards, counts = judged(service)
    assert rewards[0].value == 0.5
    assert (counts["requests"], counts["requests_repeated"]) == (3.0, 2.0)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_service_that_always_fails_makes_the_sample_invalid(service: Service, fault: str) -> None:
    service.act = FAULTS[fault]
    rewards, counts = judged(service, retries=2)
    assert (rewards[0].value, rewards[0].reason) == (None, InvalidReason.SERVICE)
    assert "(after 3 requests)" in rewards[0].detail
    assert counts["requests"] == 3.0


def test_nobody_listens(service: Service) -> None:
    rewards, _ = judged(service, url="http://127.0.0.1:9/v1", retries=1)
    assert rewards[0].reason is InvalidReason.SERVICE and "ConnectError" in rewards[0].detail


def test_a_request_that_is_refused_is_not_repeated(service: Service) -> None:
    service.act = lambda handler, number: answer(handler, 400, b"no such model: grader")
    rewards, counts = judged(service)
    assert rewards[0].why == "service: status 400: no such model: grader"
    assert counts["requests"] == 1.0


def test_what_the_service_asks_to_wait_is_waited(service: Service) -> None:
    service.act = lambda handler, number: number == 0 and answer(handler, 429, b"", Retry_After="0.5")
    rewards, _ = judged(service)
    assert rewards[0].value == 0.5
    assert service.asked[1].at - service.asked[0].at >= 0.5


def test_a_service_that_asks_to_wait_too_long_is_not_asked_again(service: Service) -> None:
    service.act = lambda handler, number: answer(handler, 503, b"tomorrow", Retry_After="86400")
    rewards, counts = judged(service)
    assert rewards[0].reason is InvalidReason.SERVICE
    assert counts["requests"] == 1.0


def test_retry_after_may_be_a_date() -> None:
    assert 5 < seconds_to_wait(format_datetime(datetime.now(UTC) + timedelta(seconds=20), usegmt=True)) <= 20
    assert seconds_to_wait("soon") == seconds_to_wait("-3") == seconds_to_wait("nan") == 0.0


def trickle(handler: BaseHTTPRequestHandler, number: int) -> bool:
    """A byte at a time, so that no single read is late."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(200):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)
    return True


def test_a_service_that_trickles_is_late(service: Service) -> None:
    service.act = trickle
    rewards, counts = judged(service, request_deadline_s=0.3, retries=1)
    assert rewards[0].why == "service: no reply within 0.3 s (after 2 requests)"
    assert counts["requests"] == 2.0


def test_all_requests_of_a_sample_have_one_deadline(service: Service) -> None:
    service.act = lambda handler, number: answer(handler, 500, b"oops")
    rewards, _ = judged(service, deadline_s=0.5, retries=1000, backoff_s=0.05)
    assert rewards[0].why == "deadline: no answer of the judge within 0.5 s"


def test_a_slow_reply_costs_no_other_sample(service: Service) -> None:
    service.text = lambda body: "Score: 5"
    service.act = lambda handler, number: number == 0 and trickle(handler, number)
    rewards, _ = judged(service, *(f"it is {n}" for n in range(8)), request_deadline_s=0.5, retries=0)
    assert sorted(reward.value is None for reward in rewards) == [False] * 7 + [True]


def test_no_more_requests_are_on_than_may_be(service: Service) -> None:
    service.act = lambda handler, number: time.sleep(0.03) is not None
    rewards, _ = judged(service, *(f"it is {n}" for n in range(12)), max_concurrent=3)
    assert all(reward.value == 0.5 for reward in rewards)
    assert 2 <= service.most_at_once <= 3


def test_requests_are_spaced_by_the_rate(service: Service) -> None:
    began = time.monotonic()
    judged(service, *(f"it is {n}" for n in range(5)), requests_per_minute=600.0)
    assert max(asked.at for asked in service.asked) - began >= 0.4


def test_the_same_question_is_asked_once_and_kept_over_restarts(service: Service, tmp_path: Path) -> None:
    file = tmp_path / "replies.sqlite"
    first, counts = judged(service, *["it is 7"] * 5, "it is 8", kept=file, use_cache=True)
    assert (len(service.asked), counts["requests"], counts["replies_kept"]) == (2, 2.0, 4.0)
    again, counts = judged(service, "it is 8", "it is 7", kept=file, use_cache=True)
    assert (len(service.asked), counts["requests"], counts["replies_kept"], counts["cost"]) == (2, 0.0, 2.0, 0.0)
    assert [reward.value for reward in again] == [first[-1].value, first[0].value]
    judged(service, "it is 7", kept=file, model="another")
    assert len(service.asked) == 3


def put_many(path: str, name: int) -> None:
    replies = KeptReplies(Path(path))
    for at in range(40):
        replies.put(f"{at}", Reply(text=f"{at}"))
        replies.put(f"{name}/{at}", Reply(text=f"{at}"))
        found = replies.get(f"{at}")
        assert found is not None and found.text == f"{at}"


def test_several_processes_may_use_one_file(tmp_path: Path) -> None:
    file = str(tmp_path / "replies.sqlite")
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=put_many, args=(file, name)) for name in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    kept = KeptReplies(Path(file))
    assert all(kept.get(f"{name}/{at}") is not None for name in range(3) for at in range(40))
    kept.close()


def test_the_key_comes_from_the_environment_and_is_in_no_reason(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    service.act = lambda handler, number: answer(handler, 401, f"bad key {KEY}".encode())
    rewards, _ = judged(service, api_key_variable="JUDGE_KEY")
    assert service.asked[0].key == f"Bearer {KEY}"
    assert rewards[0].detail == "status 401: bad key ***"


def test_a_key_that_is_not_set_is_refused_at_start(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(UserError, match="JUDGE_KEY is not set"):
        judged(service, api_key_variable="JUDGE_KEY")


@pytest.mark.parametrize("around", ["{}\r", "{}\r\n", " {}\n"])
def test_white_space_around_a_key_is_none_of_it(service: Service, monkeypatch: pytest.MonkeyPatch, around: str) -> None:
    """The key of a file with a line end was in each sample's reason: no header may have one."""
    monkeypatch.setenv("JUDGE_KEY", around.format(KEY))
    rewards, _ = judged(service, api_key_variable="JUDGE_KEY")
    assert service.asked[0].key == f"Bearer {KEY}"
    assert rewards[0].value == 0.5


@pytest.mark.parametrize("key", ["sk-a\nsk-b", "sk-ä", "sk a", "sk\x7f"])
def test_a_key_that_no_header_can_have_is_refused_and_not_shown(
    service: Service, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("JUDGE_KEY", key)
    with pytest.raises(UserError, match="JUDGE_KEY holds no key") as caught:
        judged(service, api_key_variable="JUDGE_KEY")
    assert "sk" not in str(caught.value)
    monkeypatch.setenv("JUDGE_KEY", " \n")
    with pytest.raises(UserError, match="JUDGE_KEY is not set"):
        judged(service, api_key_variable="JUDGE_KEY")


@pytest.mark.parametrize("key", [KEY, 'sk-with"and\\'])
@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("before", range(280, 301, 4))
def test_no_part_of_a_key_is_shown_where_a_reply_is_cut(
    service: Service, monkeypatch: pytest.MonkeyPatch, key: str, status: int, before: int
) -> None:
    """A key over the end of what is shown stood there without its last letters."""
    monkeypatch.setenv("JUDGE_KEY", key)
    service.act = lambda handler, number: answer(handler, status, b"." * before + json.dumps(key).encode())
    rewards, _ = judged(service, api_key_variable="JUDGE_KEY", retries=0)
    assert rewards[0].reason is InvalidReason.SERVICE and "..." in rewards[0].detail
    assert "sk" not in rewards[0].detail


def test_a_judge_that_writes_the_key_writes_it_nowhere(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    service.text = lambda body: f"you sent {KEY}"
    rewards, _ = judged(service, api_key_variable="JUDGE_KEY")
    assert rewards[0].reason is InvalidReason.NO_ANSWER and "you sent ***" in rewards[0].detail


@pytest.mark.parametrize("content", [None, "", "I cannot say"])
def test_a_reply_without_a_number_is_not_kept(service: Service, tmp_path: Path, content: str | None) -> None:
    """It was, and no later run could ask again."""
    service.act = lambda handler, number: number == 0 and answer(handler, 200, json.dumps(completion(content)).encode())
    file = tmp_path / "replies.sqlite"
    first, _ = judged(service, kept=file, use_cache=True)
    again, counts = judged(service, kept=file, use_cache=True)
    assert first[0].reason is InvalidReason.NO_ANSWER
    assert (again[0].value, counts["requests"]) == (0.5, 1.0)
    third, counts = judged(service, kept=file, use_cache=True)
    assert (third[0].value, counts["requests"]) == (0.5, 0.0)


def test_a_template_that_fails_on_a_sample_makes_it_invalid(service: Service) -> None:
    rewards, counts = judged(service, prompt="{{ extra.nothing.more }}")
    assert rewards[0].reason is InvalidReason.RAISED and "UndefinedError" in rewards[0].detail
    assert counts["requests"] == 0.0


def test_what_waits_is_ended_with_the_judge(service: Service) -> None:
    service.act = trickle
    with Judge("quality", settings_of(service), deadline_s=60, kept=None) as judge:
        waiting = judge.submit(ask())
    with pytest.raises(CancelledError):
        waiting.result(timeout=5)
    judge.close()
    with pytest.raises(RuntimeError, match="closed"):
        judge.submit(ask())


def run_settings(inputs: Path, run_dir: Path, service: Service, *changes: str) -> object:
    return train_settings(
        inputs,
        run_dir,
        "reward.function=null",
        f"reward.components.task.function={inputs / 'reward.py'}:score",
        f"reward.components.quality.judge.url={service.url}",
        "reward.components.quality.judge.model=grader",
        "reward.components.quality.judge.api_key_variable=JUDGE_KEY",
        "reward.components.quality.judge.price_per_million_completion_tokens=2",
        "reward.components.quality.weight=0.5",
        "batch.steps=2",
        "data.validation=null",
        "checkpoint.every_steps=1",
        *changes,
    )


def test_a_run_is_judged_counts_its_cost_and_writes_no_key(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    inputs = write_inputs(tmp_path / "inputs")
    service.text = lambda body: f"Score: {sum(map(ord, body['messages'][0]['content'])) % 11}"
    service.act = lambda handler, number: number == 3 and answer(handler, 500, f"key {KEY}".encode())
    changes = ("reward.components.quality.judge.retries=0", "reward.max_invalid_share=0.9")
    assert run_training(run_settings(inputs, tmp_path / "run", service, *changes), resume=False) == 0
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    invalid = [sample for sample in samples if sample["reward"] is None]
    assert invalid and all(one["invalid"] == "service: quality: status 500: key ***" for one in invalid)
    for sample in samples:
        if sample["reward"] is not None:
            parts = sample["parts"]
            assert sample["reward"] == pytest.approx(parts["task"] + 0.5 * parts["quality"])
    metrics = [record["metrics"] for record in read_metrics(tmp_path / "run")]
    asked = sum(step["reward/quality/requests"] for step in metrics)
    assert asked == len(service.asked)
    assert sum(step["reward/quality/cost"] for step in metrics) == pytest.approx((asked - 1) * 4 * 2e-6)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert (tmp_path / "run" / "judge-quality.sqlite") in files
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ("url=localhost:8000", "W015"),
        ("prompt='{{ respones }}'", "W016"),
        ("prompt='{% if %}'", "W016"),
        ("prompt_file=missing.jinja", "W016"),
        ("pattern='score'", "W017"),
        ("pattern='('", "W017"),
        ("lowest=10", "W018"),
    ],
)
def test_the_plan_refuses_a_judge_that_cannot_work(
    service: Service, tmp_path: Path, change: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    inputs = tmp_path if (tmp_path / "train.jsonl").exists() else write_inputs(tmp_path)
    plan = build_plan(run_settings(inputs, tmp_path / "run", service, f"reward.components.quality.judge.{change}"), 14)
    assert code in [problem.code for problem in plan.problems]
    assert "W019" in [warning.code for warning in plan.warnings]
    assert plan.value("quality: judge") is not None


def test_the_plan_says_how_fast_a_judge_can_be(service: Service, tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    more = "reward.components.quality.judge.requests_per_minute=30"
    plan = build_plan(run_settings(inputs, tmp_path / "run", service, more), 14)
    assert plan.value("quality: requests a step") == 12
    assert plan.value("quality: seconds a step, at least") == 24
