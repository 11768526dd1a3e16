"""Moving a trainer's weights to vLLM in the same process: seconds, bytes, and how far that is from copying the bytes once.

Usage: python bench/gpu_weights.py --size 1.5b|7b [--repeats 10]        (vLLM must be importable)

Models have Qwen2.5's shapes and random weights in bfloat16; both sides hold all of them on one device. Copying once is the
bytes of the weights, read and written, over the bytes a second that a large copy on the same device reads and writes. The
movement is what ``VllmEngine.load_weights`` does: the copies; then the checksums of both sides; then the probe of
log-probabilities. Sleep and wake are of the whole engine, with a movement in the wake. On a processor vLLM packs its
weights, and moves through its loaders.
"""

import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import meshloom  # noqa: F401  sets the process up before torch is imported

# isort: split
import torch
from gpu_common import (
    common_arguments,
    console,
    copy_bandwidth,
    print_ratio,
    print_table,
    seconds_of,
    synchronize,
    versions_line,
)
from gpu_models import SHAPES, config_of
from transformers import AutoModelForCausalLM, Qwen2Config

from meshloom.config.settings import ModelSettings
from meshloom.rollout.vllm_build import VllmOptions, open_vllm
from meshloom.rollout.vllm_engine import VllmEngine
from meshloom.train.attention import use_layouts
from meshloom.train.model import MicrobatchBound, TrainedModel
from meshloom.weights.feed import TrainerFeed
from meshloom.weights.source import WeightsSource

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TINY = Qwen2Config(
    vocab_size=300,
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """What was measured of one size."""

    num_bytes: int
    direct: bool
    first: float
    first_places: float
    copy: float
    checksums: float
    probe: float
    gap: float
    sleep: float
    wake: float


def trained(size: str, folder: Path) -> TrainedModel:
    """A model of random weights on the device; of the folder only the configuration is made."""
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    config = TINY if size == "tiny" else config_of(SHAPES[size], SHAPES[size].vocabulary)
    with DEVICE:
        module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    module.config.save_pretrained(folder)
    use_layouts(module)
    return TrainedModel(module, ModelSettings(path=str(folder)), MicrobatchBound(4096), None)


def opened(model: TrainedModel, feed: TrainerFeed, arguments: dict[str, Any]) -> VllmEngine:
    options = VllmOptions(
        model_path=Path(model.settings.path),
        dtype=model.head.weight.dtype,
        device=DEVICE,
        max_sequences=64,
        max_model_len=1024,
        prefill_tokens=2048,
        kv_cache_bytes=2**28 if DEVICE.type == "cpu" else 2**33,
        enforce_eager=True,
        arguments=arguments,
    )
    return VllmEngine(open_vllm(options), feed=feed, eos_ids=())


def timed(work: Any) -> float:
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def measure(size: str, repeats: int) -> Seconds:
    """Move one size's weights again and again."""
    with tempfile.TemporaryDirectory() as folder:
        model = trained(size, Path(folder))
        feed, source = TrainerFeed(model), WeightsSource(model)
        engine = opened(model, feed, {})
        first = timed(lambda: engine.load_weights(1))
        first_places = feed.movement.last.seconds
        whole = seconds_of(lambda: engine.load_weights(2), repeats)
        moved, direct = feed.movement.last, feed.movement.direct
        proof = seconds_of(lambda: feed.prove(engine.score), repeats)
        if direct is None:
            copy, checked = whole - proof, whole - proof
        else:
            copy = seconds_of(lambda: direct.run(source()), repeats)
            checked = seconds_of(lambda: direct.run_and_verify(source()), repeats)
        sleep = timed(engine.sleep)
        wake = timed(engine.wake)
    return Seconds(
        num_bytes=moved.num_bytes,
        direct=moved.direct,
        first=first,
        first_places=first_places,
        copy=copy,
        checksums=checked - copy,
        probe=proof,
        gap=feed.gap,
        sleep=sleep,
        wake=wake,
    )


def main() -> None:
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--size", default="1.5b", choices=[*SHAPES])
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    out = console()
    out.print(versions_line())
    if find_spec("vllm") is None:
        out.print("not measured, vllm is not installed")
        return
    bandwidth = copy_bandwidth(arguments.tiny)
    out.print(f"copy bandwidth: {bandwidth / 1e9:,.0f} GB/s read and written")
    size = "tiny" if arguments.tiny else arguments.size
    found = measure(size, 2 if arguments.tiny else arguments.repeats)
    once = 2 * found.num_bytes / bandwidth
    rows = [
        ("weights", f"{found.num_bytes / 1e9:.3f} GB"),
        ("way", "direct copies" if found.direct else "vLLM's loaders"),
        ("copying once", f"{1e3 * once:.2f} ms"),
        ("movement, copies alone", f"{1e3 * found.copy:.2f} ms"),
        ("share of the copy bandwidth", f"{100 * once / found.copy:.0f} %"),
        ("checksums of both sides", f"{1e3 * found.checksums:.2f} ms"),
        ("probe", f"{1e3 * found.probe:.2f} ms"),
        ("mean |Δ log-prob| of the probe", f"{found.gap:.2g}"),
        ("first movement, which finds the places", f"{found.first_places:.2f} s"),
        ("the same with the first probe, which may compile the trainer's layers", f"{found.first:.2f} s"),
        ("sleep", f"{found.sleep:.2f} s"),
        ("wake, with a movement and a probe", f"{found.wake:.2f} s"),
    ]
    print_table(out, f"{size}, {DEVICE.type}", ("", "measured"), rows)
    print_ratio(out, size, found.copy / once, "seconds of the movement ÷ seconds of copying the bytes once")


if __name__ == "__main__":
    main()
