"""vLLM asleep: its memory is another's, and what wakes samples as before. On a GPU, in a process of its own: vLLM's allocator
serves one engine a process."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshloom.rollout.protocol import Request, SamplingParams
from meshloom.rollout.vllm_build import VllmOptions, open_vllm
from meshloom.rollout.vllm_engine import VllmEngine
from meshloom.weights.feed import TrainerFeed
from meshloom.weights.probe import probe_ids
from tests.vllm_engines import DEVICE, model_folder, trained

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM sleeps on a GPU only")]
CACHE_BYTES = 2**31


def tokens(engine: VllmEngine) -> list[list[int]]:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    requests = [Request(id=i, prompt_ids=[5, 6, 7 + i], params=params, seeds=[1, 2]) for i in range(8)]
    done = {(c.request_id, c.index): c.ids for c in engine.generate(requests, deadline_s=300)}
    return [done[key] for key in sorted(done)]


def sleep_and_wake(enforce_eager: bool) -> None:
    """What the test asks, in the process that it starts."""
    options = VllmOptions(
        model_path=model_folder("qwen3"),
        dtype=torch.bfloat16,
        device=DEVICE,
        max_sequences=8,
        max_model_len=1000,
        kv_cache_bytes=CACHE_BYTES,
        enforce_eager=enforce_eager,
    )
    model = trained("qwen3")
    model.module.to(torch.bfloat16)
    feed = TrainerFeed(model)
    engine = VllmEngine(open_vllm(options), feed=feed, eos_ids=())
    ids = probe_ids(97)
    tokens(engine)
    before, moved = engine.score(ids), feed.movement.last
    assert moved.direct, feed.movement.not_direct
    free = torch.cuda.mem_get_info()[0]
    engine.sleep()
    asleep = torch.cuda.mem_get_info()[0]
    assert asleep - free >= CACHE_BYTES // 2
    used = torch.empty(asleep - CACHE_BYTES // 8, dtype=torch.int8, device=DEVICE)
    del used
    engine.wake()
    assert feed.movement.last.checksum == moved.checksum
    assert all(found == pytest.approx(kept, abs=0.05) for found, kept in zip(engine.score(ids), before, strict=True))
    tokens(engine)
    engine.sleep()
    with torch.no_grad():
        model.module.get_input_embeddings().weight.mul_(-1)
    engine.load_weights(1)
    engine.wake()
    assert feed.movement.last.checksum != moved.checksum and tokens(engine) != before
    stream = engine.generate(
        [Request(id=0, prompt_ids=[4], params=SamplingParams(max_tokens=500), seeds=range(9))], deadline_s=60
    )
    next(stream)
    stream.close()
    engine.sleep()
    engine.wake()


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_memory_is_given_back_and_weights_come_anew(enforce_eager: bool) -> None:
    code = f"from tests.test_vllm_sleep import sleep_and_wake; sleep_and_wake({enforce_eager})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
