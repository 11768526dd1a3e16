"""What the GPU benchmarks' figures rest on: lengths that random weights give, counts of bytes, and how peers are read."""

import importlib
import json
import sys
import time
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import torch
from rich.console import Console
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshloom.rollout.protocol import Request, SamplingParams
from meshloom.rollout.torch_engine import TorchEngine
from meshloom.train.attention import use_layouts

BENCH = Path(__file__).resolve().parent.parent / "bench"
MEAN, LONGEST = 12.0, 96


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):
    """A module of the benchmarks, by its name."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


@pytest.fixture
def tailed(bench, tmp_path: Path) -> tuple[ModuleType, Path]:
    models = bench("gpu_models")
    return models, models.make_model(tmp_path / "model", "tiny", tokenizer=None, mean_length=MEAN)


@pytest.mark.parametrize("depth", [2, 28])
def test_the_end_token_is_as_likely_as_the_wanted_mean_says(
    bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, depth: int
) -> None:
    """Also behind as many layers as a real model has, each adding more than there is."""
    models = bench("gpu_models")
    if depth > 2:
        config_of = models.config_of
        monkeypatch.setattr(
            models, "config_of", lambda *given, **more: config_of(*given, initializer_range=0.1, **more)
        )
        monkeypatch.setitem(models.SHAPES, "tiny", models.Shape(256, 256, depth, 4, 2, 0, True))
    folder = models.make_model(tmp_path / "model", "tiny", tokenizer=None, mean_length=MEAN)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer, tail = AutoTokenizer.from_pretrained(folder), models.Tail.of_mean(MEAN)
    prompt = models.chat_ids(tokenizer, "What is 1+2?")
    kind = model.get_input_embeddings().weight[:, models.KIND]

    def chances(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0, -1].softmax(-1)

    start = chances(prompt)
    assert float(start[tokenizer.eos_token_id]) < 1e-6
    assert float(start[kind < 0].sum()) == pytest.approx(tail.long_share, abs=0.03)
    for sign, mean in ((1, tail.short), (-1, tail.long)):
        after = chances([*prompt, *(kind == sign).nonzero().flatten()[:3].tolist()])
        assert 1 / float(after[tokenizer.eos_token_id]) == pytest.approx(mean, rel=0.05)
        assert float(after[kind == -sign].sum()) < 1e-4


def test_sampled_lengths_have_the_wanted_mean_and_a_long_tail(tailed: tuple[ModuleType, Path]) -> None:
    models, folder = tailed
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    use_layouts(model)
    tokenizer, tail = AutoTokenizer.from_pretrained(folder), models.Tail.of_mean(MEAN)
    engine = TorchEngine(model, eos_ids=(tokenizer.eos_token_id,))
    request = Request(
        id=0,
        prompt_ids=models.chat_ids(tokenizer, "What is 1+2?"),
        params=SamplingParams(max_tokens=LONGEST),
        seeds=list(range(400)),
    )
    lengths = torch.tensor([len(c.ids) for c in engine.generate([request], deadline_s=300)]).double()
    expected = tail.expected(LONGEST)
    assert float(lengths.mean()) == pytest.approx(expected, abs=4 * float(lengths.std()) / len(lengths) ** 0.5)
    assert float(lengths.max()) > 5 * expected and float(lengths.median()) < 0.7 * expected


def test_an_untied_head_gives_the_same_lengths(bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    models = bench("gpu_models")
    monkeypatch.setitem(models.SHAPES, "tiny", models.Shape(64, 128, 2, 4, 2, 0, False))
    folder = models.make_model(tmp_path / "model", "tiny", tokenizer=None, mean_length=MEAN)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(model.get_output_embeddings().weight, model.get_input_embeddings().weight)


def test_bytes_that_decoding_reads(bench, tmp_path: Path) -> None:
    """Two sequences of prompts 3 and 5 and two tokens each: the keys and values of 4 + 6, then of 5 + 7 tokens."""
    models, engine = bench("gpu_models"), bench("gpu_engine")
    model = AutoModelForCausalLM.from_pretrained(models.make_model(tmp_path / "model", "tiny", tokenizer=None))
    shape = models.SHAPES["tiny"]
    weights = sum(p.nbytes for p in model.parameters())
    token = 2 * shape.layers * shape.kv_heads * (shape.hidden // shape.heads) * 2
    assert model.dtype == torch.bfloat16
    assert engine.decode_bytes(model, 8, engine.Load(sequences=2, tokens=2)) == 2 * weights + (10 + 12) * token


def test_lines_of_verl_are_read(bench, tmp_path: Path) -> None:
    sides = bench("gpu_sides")
    log = (
        "(TaskRunner pid=7) step:0 - val-core/bench/acc/mean@1:0.25\n"
        "something else step: 3\n"
        "(TaskRunner pid=7) step:1 - critic/score/mean:0.5 - response_length/mean:512.0 - "
        "timing_s/gen:20.1 - timing_s/old_log_prob:np.float64(3.4) - timing_s/update_actor:5.2 - "
        "timing_s/update_weights:2.8e-01 - timing_s/step:30.1 - val-core/bench/acc/mean@1:0.75\n"
        "(TaskRunner pid=7) step:2 - timing_s/st"
    )
    (tmp_path / "log").write_text(log)
    job = sides.Job(model=tmp_path, data=tmp_path, work=tmp_path)
    before, step = sides.Verl("").steps(job)
    assert (before.number, before.accuracy) == (0, 0.25)
    assert (step.number, step.seconds, step.tokens, step.reward, step.accuracy) == (1, 30.1, 64 * 8 * 512, 0.5, 0.75)
    assert step.phases == {"generate": 20.1, "log_prob": 3.4, "update": 5.2, "weights": 0.28}


def test_a_validation_is_no_part_of_the_next_step(bench, tmp_path: Path) -> None:
    sides = bench("gpu_sides")
    job = sides.Job(model=tmp_path, data=tmp_path, work=tmp_path, validate_every=1, steps=2)

    def record(kind: str, step: int, time: float, **metrics: float) -> str:
        return json.dumps({"kind": kind, "step": step, "time": time, "phases": {}, "metrics": metrics}) + "\n"

    lengths = {"response_tokens_mean": 4.0, "samples": 8}
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(
        record("validation", 0, 10.0, accuracy=0.1)
        + record("train", 1, 20.0, **lengths)
        + record("validation", 1, 25.0, accuracy=0.2)
        + record("train", 2, 28.0, **lengths)
    )
    ours = sides.Ours()
    steps = ours.steps(job)
    assert [(step.number, step.seconds, step.accuracy) for step in steps] == [
        (0, None, 0.1),
        (1, None, 0.2),
        (2, 3.0, None),
    ]
    assert not ours.is_over(job)


@dataclass
class Traced:
    """What the profiler tells of one thing that happened on a device."""

    what: str
    start: float
    stop: float
    device: DeviceType = DeviceType.CUDA
    label: bool = False

    def name(self) -> str:
        return self.what

    def start_ns(self) -> int:
        return int(self.start * 1e9)

    def duration_ns(self) -> int:
        return int((self.stop - self.start) * 1e9)

    def device_type(self) -> DeviceType:
        return self.device

    def is_user_annotation(self) -> bool:
        return self.label


def test_shares_without_a_kernel(bench) -> None:
    """Kernels from 0 to 3 and 2 to 4 of 10 seconds, a copy from 4 to 5."""
    events = [
        Traced("product", 2, 4),
        Traced("product", 0, 3),
        Traced("Memcpy DtoH", 4, 5),
        Traced("cudaLaunchKernel", 0, 9, device=DeviceType.CPU),
        Traced("a step", 0, 10, label=True),
    ]
    shares = bench("gpu_idle").idle_shares(events, 10.0)
    assert shares == pytest.approx({"seconds": 10.0, "kernels": 2.0, "no_kernel": 0.6, "no_kernel_or_copy": 0.5})


def test_events_of_the_profiler_are_read(bench) -> None:
    """The profiler's own events, of this processor: they have what is read of them."""
    with profile(activities=[ProfilerActivity.CPU]) as traced:
        torch.randn(64, 64) @ torch.randn(64, 64)
    events = traced.profiler.kineto_results.events()
    shares = bench("gpu_idle").idle_shares(events, 3600.0, device=DeviceType.CPU)
    assert shares["kernels"] >= 2 and 0.9 < shares["no_kernel"] < 1.0


def test_a_side_waits_at_its_gate(bench, tmp_path: Path) -> None:
    """Its first step is held up by its rewards, and it does all its steps once the gate is open."""
    together, sides, grpo = bench("gpu_together"), bench("gpu_sides"), bench("gpu_grpo")
    options = Namespace(lengths="exact", tiny=True, work=tmp_path, tokenizer=None, steps=2, size="tiny")
    peer = together.Waiting("ours", sides.Ours(), grpo.job_of(options))
    try:
        until = time.monotonic() + 120
        while not peer.is_at_gate and not peer.has_ended and time.monotonic() < until:
            time.sleep(0.1)
        assert peer.is_at_gate, (peer.job.work / "log").read_text()
        assert peer.side.steps(peer.job) == []
        run = peer.pass_gate(Console(), deadline_s=120)
        assert [step.number for step in run.steps] == [1, 2] and len(run.counted) == 1
        family = [peer.process, *peer.process.children(recursive=True)]
    finally:
        peer.end()
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)


def test_what_a_side_starts_is_gone_when_it_is_done(bench, tmp_path: Path) -> None:
    """A side whose own children outlive it, as servers do."""
    common = bench("gpu_common")
    child = (
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    log = tmp_path / "log"
    ended = common.watch([sys.executable, "-c", child], log, done=lambda: log.stat().st_size > 0, deadline_s=30)
    assert ended.code is None
    assert not psutil.pid_exists(int(log.read_text()))


def test_rewards_have_a_spread_and_know_the_answer(bench) -> None:
    reward = bench("gpu_reward")
    assert reward.last_number("", "3 + 4 is 7.", "7") == 1.0
    assert reward.last_number("", "the answer is -7", "7") == 0.0
    assert reward.last_number("", "none", "7") == 0.0
    assert reward.spread("", "abCD", "7") == pytest.approx(0.05)


def test_tiles_of_a_decode_step_are_checked_and_told_as_the_table_has_them(bench) -> None:
    """Compiled and compared beside the timing; what was fastest comes out as lines that ``Choices`` takes."""
    parts, shapes = bench("gpu_decode_parts"), bench("decode_parts")
    tile = shapes.TINY_TILES[shapes.Kind.GATED][0]
    right = parts.check(parts.Job("tiny", 16, shapes.Part.GATE_UP, tile))
    wrong = parts.check(parts.Job("tiny", 16, shapes.Part.GATE_UP, replace(tile, columns=33)))
    assert not right.failure and right.error < 1e-3
    assert wrong.failure
    lines = parts.entries({("tiny", 16): {shapes.Part.GATE_UP: tile}, ("tiny", 32): {shapes.Part.GATE_UP: tile}})
    table = eval("{" + "".join(lines) + "}", {"Kind": shapes.Kind, "Tile": shapes.Tile})
    assert table == {(shapes.Kind.GATED, 256, 64): ((16, tile), (32, tile))}
    for size in ("0.5b", "1.5b", "7b"):
        for part in shapes.Part:
            for rows in (9, 192):
                tiles = shapes.tiles_for(shapes.SIZES[size], part, rows)
                assert tiles and all(shapes.SIZES[size].product(part)[1] % tile.depth == 0 for tile in tiles)
