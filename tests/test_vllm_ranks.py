"""Real vLLM over several processes: a replica on each, on devices of its own, and one replica cut over two."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshloom.fabric.local import LocalSite
from meshloom.lesson.model import build_model
from meshloom.loop.replicas import RemoteEngine
from meshloom.loop.train import run_training
from meshloom.observe.records import read_metrics, read_samples
from meshloom.plan.build import build_plan
from meshloom.rollout.protocol import Completion, FinishReason, Request, SamplingParams
from tests.lesson_runs import REWARD, train_settings, write_rows
from tests.test_episodes import GAME
from tests.test_loop_replicas import Watched, joined
from tests.test_many_devices import assert_like

pytestmark = pytest.mark.vllm
VLLM = (
    "rollout.engine=vllm",
    "rollout.vllm.enforce_eager=true",
    "rollout.kv_cache_bytes=60000000",
    "rollout.max_sequences=16",
    "algorithm.kl=none",
    "model.dtype=float32",
    "batch.steps=3",
)
LAYOUTS = {
    "two replicas": ("cluster.devices_per_node=2",),
    "devices of its own": ("cluster.devices_per_node=2", "placement.actor=[0]", "placement.rollout=[1]"),
    "one replica over two": ("cluster.devices_per_node=2", "parallel.rollout.tensor=2"),
}
NEAR = 2e-5
"""Gap of float32 with float32."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_rows(folder / "train.jsonl", 14)
    write_rows(folder / "held_out.jsonl", 5, first=20)
    (folder / "reward.py").write_text(REWARD)
    build_model(folder / "model", folder / "train.jsonl", seed=1)
    return folder


@pytest.fixture(scope="module")
def alone(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    assert run_training(train_settings(inputs, run_dir, *VLLM), resume=False) == 0
    return run_dir


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vllm_over_devices_does_what_one_device_does(inputs: Path, alone: Path, tmp_path: Path, layout: str) -> None:
    settings = train_settings(inputs, tmp_path / "run", *VLLM, *LAYOUTS[layout])
    assert run_training(settings, resume=False) == 0
    assert_like(alone, tmp_path / "run")
    gaps = [r["metrics"]["sampler_gap"] for r in read_metrics(tmp_path / "run") if r["kind"] == "train"]
    assert len(gaps) == 3 and max(gaps) < NEAR
    assert not list(Path("/dev/shm").glob("meshloom-*")), "memory that ranks shared has still a name"


def test_turns_of_episodes_join_those_that_a_cut_replica_generates(inputs: Path, tmp_path: Path) -> None:
    """Each rank takes the same ones; what was sampled turn by turn is what is trained on."""
    (inputs / "game.py").write_text(GAME)
    settings = train_settings(
        inputs,
        tmp_path / "run",
        *VLLM,
        *LAYOUTS["one replica over two"],
        f"environment.gym={inputs}/game.py:Gym",
        "environment.workers=1",
        "environment.max_turn_tokens=12",
        "data.train.files=[]",
        "data.train.episodes=6",
        "data.validation=null",
        "reward.function=null",
        "rollout.max_response_tokens=90",
        "batch.tokens_per_microbatch=400",
        "batch.steps=2",
    )
    assert run_training(settings, resume=False) == 0
    steps = [r["metrics"] for r in read_metrics(tmp_path / "run") if r["kind"] == "train"]
    assert len(steps) == 2 and all(metrics["sampler_gap"] < NEAR for metrics in steps)
    records = list(read_samples(tmp_path / "run"))
    assert len(records) == 24 and {r["turns"] for r in records} >= {2} and not any(r["invalid"] for r in records)


@contextmanager
def replicas_of_vllm(
    inputs: Path, run_dir: Path, replicas: list[list[int]], *changes: str
) -> Iterator[tuple[Watched, RemoteEngine]]:
    """Workers of a run, and its engine with the actor's weights."""
    settings = train_settings(inputs, run_dir, *VLLM, "rollout.max_response_tokens=150", *changes)
    arguments = {"checkpoint": None, "updates": 0, "critic_updates": 0}
    arguments |= {"settings": settings, "layout": build_plan(settings, 14).layout}
    host, logs = "meshloom.loop.worker_host:WorkerHost", run_dir / "logs"
    with LocalSite(["cpu"] * 2) as site, Watched(host, site=site, logs=logs) as workers:
        workers.given, workers.before = [], None
        workers.call("build", arguments, phase="start", deadline_s=300)

        def move(version: int) -> None:
            workers.call("move_weights", {"version": version}, phase="sync", deadline_s=300)

        engine = RemoteEngine(workers, replicas, vocabulary=274, move_weights=move, takes_turns=True)
        engine.load_weights(0)
        yield workers, engine


def request(number: int, longest: int, **params: object) -> Request:
    params = SamplingParams(max_tokens=longest, ignore_eos=True, **params)
    return Request(id=number, prompt_ids=[3, 4 + number % 9], params=params, seeds=[number])


def generate(engine: RemoteEngine, requests: list[Request], *, abort: int | None = None) -> dict[int, Completion]:
    """What each request comes to, where one may be aborted after the first has ended."""
    found: dict[int, Completion] = {}
    for completion in engine.generate(requests, deadline_s=300):
        found[completion.request_id] = completion
        assert len(completion.ids) == len(completion.logprobs) == len(completion.versions)
        if abort is not None:
            engine.abort(abort)
    return found


def test_a_replica_over_two_devices_hears_what_is_aborted_and_what_joins(inputs: Path, tmp_path: Path) -> None:
    """Its ranks hear of it at different steps; all do it at the one that the first of them says."""
    with replicas_of_vllm(inputs, tmp_path / "run", [[0, 1]], *LAYOUTS["one replica over two"]) as (_, engine):
        requests = [request(0, 3), *(request(number, 150) for number in (1, 2, 3))]
        expected = generate(engine, requests)
        found = generate(engine, requests, abort=2)
        ended = found.pop(2)
        assert ended.finish is FinishReason.ABORTED and 0 < len(ended.ids) < 150
        assert ended.ids == expected[2].ids[: len(ended.ids)]
        assert ended.logprobs == pytest.approx(expected[2].logprobs[: len(ended.ids)], abs=NEAR)
        assert {number: each.ids for number, each in found.items()} == {n: expected[n].ids for n in (0, 1, 3)}
        assert joined(engine, [*requests[:-1], request(3, 2)]) == {n: each.ids for n, each in expected.items()} | {
            3: expected[3].ids[:2]
        }


def test_a_replica_of_vllm_takes_over_what_another_has_not_begun(inputs: Path, tmp_path: Path) -> None:
    """One replica has a single request that might have been long, and the other all the rest."""
    with replicas_of_vllm(inputs, tmp_path / "run", [[0], [1]], *LAYOUTS["two replicas"]) as (workers, engine):
        short = Request(
            id=0,
            prompt_ids=[3],
            params=SamplingParams(max_tokens=150, stop_ids=tuple(range(274))),
            seeds=range(60),
        )
        requests = [short, *(request(number, 150) for number in range(1, 41))]
        found = generate(engine, requests)
        (first, *taken), given = ([ids for at, ids in workers.given if at == rank] for rank in (0, 1))
        assert first == [0] and len(given[0]) == 40
        moved = {number for ids in taken for number in ids}
        assert len(moved) >= 5 and moved < set(given[0])
        assert all(each.finish is not FinishReason.ABORTED for each in found.values()) and len(found) == 41
        alone = generate(engine, [requests[number] for number in sorted(moved)])
        assert {number: each.ids for number, each in alone.items()} == {n: found[n].ids for n in moved}
