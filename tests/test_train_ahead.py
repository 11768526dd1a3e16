"""Compiling ahead: what a rehearsal makes is what a run needs, and it ends with the run."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from meshloom.config.load import load_settings
from meshloom.config.settings import LoraSettings, ModelSettings, TrainSettings
from meshloom.train.ahead import CompileAhead, request
from meshloom.train.layer_passes import LayerPasses
from meshloom.train.load import load_model
from meshloom.train.rehearsal import filled, rehearse, stand_in
from tests.models import FAMILIES, tiny_model
from tests.test_train_compile import Counting
from tests.test_train_model import SETTINGS, trained, weighted


def folder_of(path: Path, family: str, dtype: torch.dtype = torch.float32) -> Path:
    tiny_model(family, dtype).save_pretrained(path)
    return path


def settings(*overrides: str) -> TrainSettings:
    given = ["run_dir=r", "model.path=m", "data.train.reasoning_gym=basic_arithmetic", *overrides]
    return load_settings(TrainSettings, None, given)


@pytest.mark.parametrize("family", ["qwen2", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_run_finds_every_piece_made(tmp_path: Path, family: str) -> None:
    """The stand-in has fewer layers and another vocabulary, and its pass other lengths; no piece is traced again."""
    torch._dynamo.reset()
    folder = folder_of(tmp_path, family)
    backend = Counting()

    def one_pass(module: torch.nn.Module, tokens: int, longest: int) -> int:
        model = trained(module, 300)
        model.layers = LayerPasses(model.decoder, compiled=True, recompute=False, backend=backend)
        samples = filled(tokens, longest, group=8, rows=90)
        samples = samples.with_tokens(weight=torch.ones(samples.num_tokens))
        model.forward_backward(samples, weighted, temperature=1.0)
        return backend.graphs

    made = one_pass(stand_in(str(folder), torch.float32, torch.device("cpu")), 300, 40)
    assert made > 0
    assert one_pass(load_model(folder, torch.float32, torch.device("cpu")), 200, 27) == made


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)])
def test_a_stand_in_of_every_family_trains(tmp_path: Path, family: str, lora: LoraSettings | None) -> None:
    given = ModelSettings(path=str(folder_of(tmp_path, family)), compile=False, lora=lora)
    rehearse(given, "cpu", tokens=100, longest=30, group=2, asks=True)


def test_a_stand_in_shows_all_kinds_of_layers_and_no_more(tmp_path: Path) -> None:
    for family, layers in (("qwen2", 1), ("gemma3", 2)):
        model = stand_in(str(folder_of(tmp_path / family, family)), torch.bfloat16, torch.device("cpu"))
        assert (len(model.model.layers), model.dtype) == (layers, torch.bfloat16)


def test_a_rehearsal_fills_the_pass_it_is_told(tmp_path: Path) -> None:
    samples = filled(1000, 100, group=8, rows=50)
    assert samples.lengths.tolist() == [100, 99] * 5
    assert not samples["mask"][samples.offsets[:-1]].any() and samples["mask"].any()
    assert int(samples["ids"].max()) < 50
    prompts = [samples["ids"][start : start + 12].tolist() for start in samples.offsets[:-1].tolist()]
    assert [prompts.index(prompt) for prompt in prompts] == [0] * 8 + [8] * 2
    told = json.loads(request(settings("batch.tokens_per_microbatch=4096", "rollout.max_response_tokens=88"), "cuda:1"))
    assert [told[name] for name in ("device", "tokens", "longest", "group")] == ["cuda:1", 4096, 600, 8]
    assert ModelSettings(**told["model"]) == settings().model


def test_it_is_told_to_ask_only_where_the_run_does() -> None:
    for given, asks in (
        ((), False),
        (("batch.prompts_per_update=64",), False),
        (("batch.prompts_per_update=32",), True),
        (("batch.epochs_per_step=2",), True),
        (("algorithm.kl=loss",), True),
    ):
        assert json.loads(request(settings(*given), "cuda"))["asks"] is asks


def test_nothing_is_started_where_nothing_is_compiled() -> None:
    for given in ("device=cpu", "model.compile=false"):
        with CompileAhead(settings("device=cuda", given)) as ahead:
            assert ahead._process is None
            ahead.begin(settings(), "cuda")


def test_beside_vllm_it_begins_once_the_engine_is_there_and_where_memory_is_left() -> None:
    given = settings("device=cuda", "rollout.engine=vllm", "model.path=nowhere")
    for free_bytes, code in ((2**30, 0), (2**36, 1)):
        with CompileAhead(given) as ahead:
            assert ahead.after_engine
            ahead.begin(given, "cpu", free_bytes)
            ahead.wait()
            assert ahead._process.returncode == code  # a model that is nowhere is looked for, or not


def test_it_ends_with_the_run(tmp_path: Path) -> None:
    with CompileAhead(settings("device=cuda")) as ahead:
        process = ahead._process
        ahead.wait()  # not for what has not begun
        assert process is not None and process.poll() is None
    assert process.returncode is not None


def test_a_run_that_is_gone_leaves_nothing_behind() -> None:
    """Killed, a run cannot end the process: it sees that nothing more will be told."""
    process = subprocess.Popen([sys.executable, "-m", "meshloom.train.rehearsal"], stdin=subprocess.PIPE)
    process.stdin.close()
    assert process.wait(60) == 0


def test_one_that_has_failed_does_not_stop_the_run(tmp_path: Path) -> None:
    given = settings("device=cuda", f"model.path={tmp_path / 'nowhere'}")
    with CompileAhead(given) as ahead:
        ahead.begin(given, "cpu")
        ahead.wait()
        assert ahead._process.returncode == 1
        ahead.begin(given, "cpu")
        ahead.wait()


@pytest.mark.slow
def test_the_caches_on_disk_hold_all_that_a_run_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    folder = folder_of(tmp_path / "m", "qwen2", torch.bfloat16)
    told = {"model": {"path": str(folder), "compile": True, "dtype": "bfloat16"}, "device": "cpu"}
    text = json.dumps({**told, "tokens": 1500, "longest": 60, "group": 8, "asks": True})
    command = [sys.executable, "-m", "meshloom.train.rehearsal"]
    began = time.monotonic()
    subprocess.run(command, input=text, text=True, check=True)
    seconds = time.monotonic() - began
    code = "import sys; from tests.test_train_ahead import compiled_pieces\nprint(compiled_pieces(sys.argv[1]))"
    out = subprocess.run([sys.executable, "-c", code, str(folder)], text=True, check=True, capture_output=True).stdout
    hits, misses, first_pass = (float(word) for word in out.split()[-3:])
    assert hits > 0 and misses == 0
    assert first_pass < seconds / 2


def compiled_pieces(folder: str) -> str:
    """Pieces found in the caches and not found by a first pass, and its seconds."""
    from torch._dynamo.utils import counters

    given = SETTINGS.model_copy(update={"compile": True, "gradient_checkpointing": True})
    model = trained(load_model(folder, torch.bfloat16, torch.device("cpu")), 2000, settings=given)
    began = time.monotonic()
    samples = filled(700, 50, group=8, rows=90)
    samples = samples.with_tokens(weight=torch.ones(samples.num_tokens))
    model.forward_backward(samples, weighted, temperature=1.0)
    model.forward(samples, temperature=1.0)
    seen = counters["aot_autograd"]
    return f"{seen['autograd_cache_hit']} {seen['autograd_cache_miss']} {time.monotonic() - began}"
