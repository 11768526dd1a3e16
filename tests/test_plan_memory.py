"""The memory ledger and the model folder it is read from."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from meshloom.config.errors import UserError
from meshloom.config.load import load_settings
from meshloom.config.settings import EvalSettings, SftSettings, TrainSettings
from meshloom.plan import build_plan
from meshloom.plan.memory import ModelShape, compute_bytes
from meshloom.plan.model_folder import read_model_folder, read_safetensors_header, refuse_pickles

CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 10,
    "tie_word_embeddings": True,
}
SHAPES = {
    "model.embed_tokens.weight": (10, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.mlp.up_proj.weight": (16, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (10, 8),
}


def make_folder(path: Path, config: dict = CONFIG, names: tuple[str, ...] = tuple(SHAPES)) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: np.zeros(SHAPES[name], np.float32) for name in names}, path / "model.safetensors")
    return path


def plan(folder: Path, kind: type = TrainSettings, *overrides: str):
    given = [
        "run_dir=runs/a",
        f"model.path={folder}",
        "data.train.reasoning_gym=basic_arithmetic",
        "device=cpu",
        *overrides,
    ]
    return build_plan(load_settings(kind, None, given), 1000)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3"])
def test_parameters_and_shapes_are_those_of_the_loaded_model(tmp_path: Path, family: str) -> None:
    from tests.models import tiny_model

    model = tiny_model(family)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    folder = read_model_folder(tmp_path)
    assert folder.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    layer = model.model.layers[0]
    shape = ModelShape.of(folder)
    assert shape.query_width == layer.self_attn.q_proj.out_features
    assert shape.key_value_width == layer.self_attn.k_proj.out_features
    assert shape.intermediate == layer.mlp.up_proj.out_features
    assert (shape.num_layers, shape.vocabulary) == (
        len(model.model.layers),
        model.get_input_embeddings().num_embeddings,
    )


def test_adapter_parameters_are_those_that_peft_adds(tmp_path: Path) -> None:
    from meshloom.config.settings import LoraSettings
    from meshloom.train.load import add_lora
    from tests.models import tiny_model

    for targets in ("[all-linear]", "[q_proj, up_proj]"):
        model = tiny_model("qwen3")
        model.save_pretrained(tmp_path)
        settings = plan(tmp_path, TrainSettings, "model.lora.rank=3", f"model.lora.target_modules={targets}")
        lora = LoraSettings(rank=3, target_modules=tuple(targets.strip("[]").split(", ")))
        wrapped = add_lora(model, lora, seed=0)
        trained = sum(parameter.numel() for parameter in wrapped.parameters() if parameter.requires_grad)
        assert settings.value("trained parameters") == trained


def test_the_estimate_of_activations_is_near_what_a_layer_keeps() -> None:
    """Bytes of the distinct tensors that autograd keeps, ÷ the estimate; more norms than Llama's keep more.

    Compiled, they are kept by the code that the compiler's own partition gives, of a model whose MLP is as wide as usual.
    """
    import torch

    from meshloom.plan.model_folder import ModelFolder
    from meshloom.train.attention import PackedAttention, use_layouts
    from meshloom.train.layer_passes import LayerPasses
    from tests.models import tiny_model

    tokens, lengths, wide = 512, [64] * 8, {"hidden_size": 128, "intermediate_size": 640, "head_dim": 32}
    plain = [("llama", 1.2), ("qwen2", 1.2), ("qwen3", 1.4), ("gemma3", 1.7)]
    kinds = [(*kind, False) for kind in plain]
    kinds += [(family, most, True) for family, most in (("qwen2", 1.05), ("qwen3", 1.1), ("gemma3", 1.15))]
    for family, most, compiled in kinds:
        torch._dynamo.reset()
        model = tiny_model(family, torch.bfloat16, **wide) if compiled else tiny_model(family)
        use_layouts(model)
        passes = LayerPasses(model.model, compiled=compiled, recompute=False, backend="aot_eager_decomp_partition")
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor, kept: dict = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with passes.active(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.model(
                input_ids=torch.zeros(1, tokens, dtype=torch.long),
                position_ids=(torch.arange(tokens) % 64)[None],
                layout=PackedAttention(lengths),
                use_cache=False,
            )
        measured = sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in weights)
        shape = ModelShape.of(ModelFolder(Path(), model.config.to_dict(), {}))
        values = tokens * shape.num_layers * shape.values_per_token_and_layer(compiled=compiled)
        ratio = measured / (values * model.dtype.itemsize)
        assert 1.0 <= ratio <= most, (family, compiled, ratio)


def test_the_ledger_adds_up_by_hand(tmp_path: Path) -> None:
    found = plan(make_folder(tmp_path / "m"), TrainSettings, "batch.tokens_per_microbatch=1024", "model.dtype=float32")
    parameters = 10 * 8 + 8 * 8 + 16 * 8 + 8
    assert found.value("parameters") == parameters
    assert found.value("weights") == 4 * parameters
    assert found.value("float32 masters") == 0
    assert found.value("optimizer moments") == 8 * parameters
    assert found.value("gradients") == 4 * parameters
    assert found.value("logits") == 1024 * 10 * 4
    layer = 4 * 8 + 3 * 8 + 3 * 4 + 4 * 16
    assert found.value("activations") == 1024 * 2 * layer * 4
    assert found.value("cache per token") == 2 * 2 * 4 * 4
    assert found.value("key-value cache") == 512 * 1024 * 64
    assert found.value("peak while updating") == 16 * parameters + 1024 * 40 + 1024 * 2 * layer * 4
    assert found.value("peak while generating") == 12 * parameters + 512 * 1024 * 64


def test_narrow_arithmetic_needs_masters_and_halves_the_rest(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    wide, narrow = (plan(folder, TrainSettings, f"model.dtype={dtype}") for dtype in ("float32", "bfloat16"))
    for name in ("weights", "activations", "cache per token", "key-value cache"):
        assert 2 * narrow.value(name) == wide.value(name)
    assert narrow.value("float32 masters") == wide.value("weights")
    assert compute_bytes("auto", "cpu") == 4
    assert compute_bytes("auto", "cuda:1") == 2


def test_bounds_of_memory_bound_the_ledger(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    bounded = plan(folder, TrainSettings, "rollout.kv_cache_bytes=1000", "model.logits_chunk_bytes=500")
    assert (bounded.value("key-value cache"), bounded.value("logits")) == (1000, 500)
    recomputed = plan(folder, TrainSettings, "model.gradient_checkpointing=true")
    assert recomputed.value("activations") < plan(folder).value("activations")


def test_a_reference_is_counted_only_when_it_is_used(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    with pytest.raises(KeyError):
        plan(folder).value("reference weights")
    assert plan(folder, TrainSettings, "algorithm.kl=loss").value("reference weights") == 4 * (80 + 64 + 128 + 8)
    assert plan(folder, TrainSettings, "algorithm.kl=loss", "model.lora.rank=2").value("reference weights") == 0


def test_each_kind_of_run_has_its_own_phases(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    names = {
        kind: {line.name for line in plan(folder, kind).lines} for kind in (TrainSettings, SftSettings, EvalSettings)
    }
    assert {"peak while generating", "peak while updating"} <= names[TrainSettings]
    assert "key-value cache" not in names[SftSettings]
    assert "optimizer moments" not in names[EvalSettings]


def test_an_untied_head_is_counted(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", {**CONFIG, "tie_word_embeddings": False})
    assert read_model_folder(folder).num_parameters == 2 * 80 + 64 + 128 + 8


def test_adapters_that_attach_to_nothing_are_refused(tmp_path: Path) -> None:
    found = plan(make_folder(tmp_path / "m"), TrainSettings, "model.lora.target_modules=[q_proj, qkv]")
    assert [problem.code for problem in found.problems] == ["L002"]
    assert "'qkv'" in found.problems[0].what
    assert found.problems[0].fix == "its layers are up_proj, q_proj, or all-linear"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "dynamic"},
                "sliding_attention": {"rope_type": "default"},
            }
        },
        {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64}},
        {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 64},
    ],
)
def test_rotary_embeddings_that_change_with_a_pass_are_refused_where_they_would(tmp_path: Path, rope: dict) -> None:
    """Log-probs used to differ by whole nats with what a sample was packed with, and nothing said so."""
    config = {**CONFIG, "max_position_embeddings": 64} | rope
    folder = make_folder(tmp_path / "model", config)
    lengths = "data.max_prompt_tokens=32", "rollout.max_response_tokens=32"
    assert plan(folder, TrainSettings, *lengths).problems == ()
    (problem,) = plan(folder, TrainSettings, *lengths, "validation.max_response_tokens=33").problems
    assert (problem.code, "at most 64 tokens" in problem.fix) == ("M003", True)


@pytest.mark.parametrize(
    "kind",
    [
        {"model_type": "gemma2", "attn_logit_softcapping": 50.0},
        {"model_type": "gpt_oss"},
        {"layer_types": ["conv", "full_attention"]},
    ],
)
def test_attention_that_no_kernel_computes_is_refused(tmp_path: Path, kind: dict) -> None:
    """A plan used to pass, and the run ended with a traceback at its first token."""
    folder = make_folder(tmp_path / "model", CONFIG | kind)
    found = plan(folder, TrainSettings).problems
    assert [problem.where.split()[0] for problem in found if problem.code == "M011"] == ["model.path"]


def test_sequences_longer_than_the_model_was_made_for_are_warned_about(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", {**CONFIG, "max_position_embeddings": 64})
    lengths = "data.max_prompt_tokens=32", "rollout.max_response_tokens=32"
    assert plan(folder, TrainSettings, *lengths).warnings == ()
    (warning,) = plan(folder, TrainSettings, *lengths[:1], "rollout.max_response_tokens=33").warnings
    assert (warning.code, "65 tokens" in warning.what) == ("M004", True)


def test_an_unknown_architecture_is_planned_without_memory(tmp_path: Path) -> None:
    found = plan(make_folder(tmp_path / "m", {"n_layer": 2}))
    assert found.problems == ()
    assert [warning.code for warning in found.warnings] == ["M002"]
    assert "num_hidden_layers, hidden_size" in found.warnings[0].what


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_model_folder(folder)
    return str(caught.value)


def test_what_is_no_model_folder_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path / "smollm2")
    assert "folders nearby: smollm2" in refusal(tmp_path / "smollm")
    (tmp_path / "smollm2" / "config.json").write_text("{")
    assert "config.json is not JSON" in refusal(tmp_path / "smollm2")
    (tmp_path / "smollm2" / "config.json").unlink()
    message = refusal(tmp_path / "smollm2")
    assert "has no config.json" in message
    assert "it holds: model.safetensors" in message


def test_missing_and_damaged_weights_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for content, said in (
        (whole[:-1], f"cut off: it has {len(whole) - 1} bytes, its header needs {len(whole)}"),
        (whole[:20], "not a safetensors file"),
        (b"", "it is 0 bytes of something else"),
        (b"PK\x03\x04" + bytes(100), "a zip archive, as torch.save writes"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "a pickle"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ((2).to_bytes(8, "little") + b"[]", "something else"),
    ):
        weights.write_bytes(content)
        assert said in refusal(folder)
    weights.unlink()
    assert "model.safetensors is missing" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    assert "pytorch_model.bin is a pickle, not safetensors" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    assert "1 of 1 files of weights are missing: one.safetensors" in refusal(folder)


def test_pickles_beside_safetensors_are_left_alone_and_in_their_place_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    (folder / "training_args.bin").write_bytes(b"x")
    refuse_pickles(folder)
    (folder / "inside").mkdir()
    (folder / "inside" / "state.pt").write_bytes(b"x")
    with pytest.raises(UserError, match="state.pt is a pickle"):
        refuse_pickles(folder)


def test_headers_are_read_as_the_library_writes_them(tmp_path: Path) -> None:
    save_file(
        {"a": np.zeros((2, 3), np.float16), "b": np.zeros((), np.int64)}, tmp_path / "x.safetensors", {"format": "pt"}
    )
    header = read_safetensors_header(tmp_path / "x.safetensors")
    assert {name: (tensor.dtype, tensor.shape, tensor.num_values) for name, tensor in header.items()} == {
        "a": ("F16", (2, 3), 6),
        "b": ("I64", (), 1),
    }


def test_a_plan_is_made_without_torch(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    code = (
        "import sys; from meshloom.config.load import load_settings; from meshloom.config.settings import TrainSettings\n"
        "from meshloom.plan import build_plan; from meshloom.plan.report import plan_text\n"
        f"given = ['run_dir=r', 'model.path={folder}', 'data.train.reasoning_gym=basic_arithmetic']\n"
        "print(len(plan_text(build_plan(load_settings(TrainSettings, None, given), 100))) > 1000)\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'pyarrow'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split("\n")[:2] == ["True", "[]"]


def test_folders_of_a_run_say_where_the_model_is(tmp_path: Path) -> None:
    run, checkpoint = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-000001"
    (checkpoint / "adapter").mkdir(parents=True)
    (checkpoint / "adapter" / "adapter_config.json").write_text("{}")
    for folder in (run, checkpoint):
        assert f"meshloom export {folder} DEST" in refusal(folder)
    assert "adapters alone" in refusal(checkpoint / "adapter")
    make_folder(checkpoint / "model")
    assert str(checkpoint / "model") in refusal(checkpoint)


def test_activations_are_those_of_no_more_tokens_than_an_update_has(tmp_path: Path) -> None:
    """A small update used to be counted with all tokens that a microbatch may hold."""
    folder = make_folder(tmp_path / "m")
    lengths = "data.max_prompt_tokens=10", "batch.tokens_per_microbatch=1000"
    rl = *lengths, "rollout.max_response_tokens=20", "batch.samples_per_prompt=3"
    sft = *lengths, "data.max_response_tokens=20"
    for kind, given, tokens in (
        (TrainSettings, (*rl, "batch.prompts_per_step=4", "batch.prompts_per_update=2"), 2 * 3 * 30),
        (TrainSettings, (*rl, "batch.prompts_per_step=4"), 4 * 3 * 30),
        (TrainSettings, (*rl, "batch.samples_per_microbatch=5"), 5 * 30),
        (TrainSettings, rl, 1000),
        (SftSettings, (*sft, "batch.samples_per_update=7"), 7 * 30),
    ):
        found = plan(folder, kind, *given)
        assert found.value("tokens at once") == tokens
        assert found.value("activations") == tokens * 2 * (4 * 8 + 3 * 8 + 3 * 4 + 4 * 16) * 4


def test_the_cache_is_bounded_by_the_memory_of_this_machine(tmp_path: Path) -> None:
    """The line said "at most a quarter of the free memory" and showed more."""
    found = plan(make_folder(tmp_path / "m", {**CONFIG, "num_hidden_layers": 10**7}), EvalSettings)
    assert 0 < found.value("key-value cache") <= found.value("memory of this machine") / 4
    (line,) = (line for line in found.lines if line.name == "key-value cache")
    assert "a quarter of the memory available on this machine now" in line.formula


def test_a_run_larger_than_the_machine_is_warned_about(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", {**CONFIG, "num_hidden_layers": 10**7})
    (warning,) = plan(folder, TrainSettings).warnings
    assert warning.code == "M005"
    assert "peak while updating" in warning.what
    assert (warning.fix, warning.suggestions) == ("a smaller model", ())
    (kept,) = plan(folder, EvalSettings, f"rollout.kv_cache_bytes={2**53}").warnings
    assert kept.code == "M005"
    assert plan(folder, TrainSettings, "device=cuda").warnings == ()


def test_the_plan_says_how_the_model_computes(tmp_path: Path) -> None:
    config = {**CONFIG, "head_dim": 64}
    folder = make_folder(tmp_path / "m", config)
    here, gpu = plan(folder), plan(folder, TrainSettings, "device=cuda", "batch.tokens_per_microbatch=1024")
    assert (here.value("attention"), here.value("compiled")) == ("sdpa", "no")
    assert gpu.value("attention") == "varlen" and gpu.value("compiled") == "yes"
    assert gpu.value("logits") == 1024 * 10 * (4 + 2)
    assert plan(folder, TrainSettings, "device=cuda", "model.dtype=float32").value("attention") == "sdpa"
    assert plan(folder, TrainSettings, "model.compile=true").value("compiled") == "yes"
    refused = plan(folder, TrainSettings, "model.attention=varlen")
    assert [problem.code for problem in refused.problems] == ["M006"] and "not on a GPU" in str(refused.problems[0])


QWEN = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}


def qwen_folder(path: Path, size: str) -> Path:
    """A folder with the sizes of Qwen2.5, whose file of weights has a header and no content behind it but a hole."""
    config = {**QWEN[size], "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}
    config |= {"model_type": "qwen2", "hidden_act": "silu"}
    hidden, mlp, layers = (config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for n in range(layers):
        at, kv = f"model.layers.{n}", 2 * hidden // config["num_attention_heads"]
        shapes |= {
            f"{at}.self_attn.{name}_proj.weight": [rows, hidden]
            for name, rows in zip("qkvo", (hidden, kv, kv, hidden), strict=True)
        }
        shapes |= {
            f"{at}.self_attn.{name}_proj.bias": [rows] for name, rows in zip("qkv", (hidden, kv, kv), strict=True)
        }
        shapes |= {f"{at}.mlp.{name}_proj.weight": [mlp, hidden] for name in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": [hidden, mlp]}
        shapes |= {f"{at}.{name}_layernorm.weight": [hidden] for name in ("input", "post_attention")}
    header, end = {}, 0
    for name, shape in shapes.items():
        size_bytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size_bytes]}
        end += size_bytes
    text = json.dumps(header).encode()
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path


@pytest.mark.parametrize(
    ("size", "tokens", "moments", "measured_gib"),
    [("0.5b", 16380, False, 20), ("1.5b", 16380, False, 46), ("0.5b", 32768, True, 38), ("1.5b", 32768, True, 91)],
)
def test_the_peak_while_updating_is_near_what_a_gpu_held(
    tmp_path: Path, size: str, tokens: int, moments: bool, measured_gib: float
) -> None:
    """Most bytes allocated in whole runs on an H200, compiled, in bfloat16; the first two before the optimizer has moments."""
    given = ("device=cuda", f"batch.tokens_per_microbatch={tokens}")
    found = plan(qwen_folder(tmp_path / "m", size), TrainSettings, *given)
    peak = found.value("peak while updating") - (0 if moments else found.value("optimizer moments"))
    assert peak / 2**30 == pytest.approx(measured_gib, rel=0.025)


def test_layers_are_recomputed_only_where_the_ledger_asks_for_it(tmp_path: Path) -> None:
    folder = qwen_folder(tmp_path / "m", "1.5b")
    given = ("device=cuda", "batch.tokens_per_microbatch=32768")
    unasked = plan(folder, TrainSettings, *given)
    assert (unasked.value("recomputed"), unasked.recompute) == ("open", False)
    peak = unasked.value("peak while updating")
    enough = int(peak * 1.1) + 2 * 2**30 + 1
    for memory, on in ((enough, False), (enough - 2, True)):
        found = plan(folder, TrainSettings, *given, f"device_memory_bytes={memory}")
        assert (found.value("recomputed"), found.recompute) == ("yes" if on else "no", on)
        assert found.value("memory of the GPU") == memory
        assert (found.value("peak while updating") < peak) is on
        assert found.warnings == ()
    forced = plan(folder, TrainSettings, *given, f"device_memory_bytes={peak}", "model.gradient_checkpointing=false")
    assert (forced.recompute, forced.value("recomputed")) == (False, "no")
    (problem,) = plan(folder, TrainSettings, *given, f"device_memory_bytes={2**34}").problems
    assert (problem.code, "on a device of 16.0 GiB" in problem.what) == ("M007", True)


def test_what_a_run_is_told_of_its_gpu_counts_like_the_setting(tmp_path: Path) -> None:
    folder = qwen_folder(tmp_path / "m", "1.5b")
    given = ["run_dir=r", f"model.path={folder}", "data.train.reasoning_gym=basic_arithmetic", "device=cuda"]
    settings = load_settings(TrainSettings, None, given)
    told = build_plan(settings, 1000, device_memory=2**35)
    assert (told.recompute, told.value("memory of the GPU")) == (True, 2**35)
    given.append(f"device_memory_bytes={2**38}")
    assert not build_plan(load_settings(TrainSettings, None, given), 1000, device_memory=2**35).recompute


def test_on_the_processor_layers_are_recomputed_only_beyond_its_memory(tmp_path: Path) -> None:
    small = plan(make_folder(tmp_path / "m"))
    assert (small.value("recomputed"), small.recompute) == ("no", False)
    large = plan(make_folder(tmp_path / "n", {**CONFIG, "num_hidden_layers": 10**7}))
    assert (large.value("recomputed"), large.recompute) == ("yes", True)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"head_dim": 24}, {"head_dim": 8}, {"hidden_act": "relu", "hidden_activation": "relu"}, "dynamic", "phi3"],
)
def test_the_plan_names_the_engine_that_a_model_gets(tmp_path: Path, family: str, changes: dict | str) -> None:
    """The plan's rule reads config.json, the engine's the modules: they must not part."""
    import torch
    from transformers import AutoModelForCausalLM, Phi3Config

    from meshloom.plan.decoding import LAYERS, PAGED
    from meshloom.rollout.decode_stack import reason_against
    from tests.models import CONFIGS, tiny_model

    if changes == "phi3":
        shape = {k: v for k, v in CONFIGS["llama"]().to_dict().items() if k.startswith(("num_", "vocab", "pad"))}
        model = AutoModelForCausalLM.from_config(Phi3Config(**shape, hidden_size=64, intermediate_size=96))
    elif changes == "dynamic":
        model = tiny_model(family)
        ropes = model.config.rope_parameters
        for rope in [ropes, *(entry for entry in ropes.values() if isinstance(entry, dict))]:
            if "rope_type" in rope:
                rope |= {"rope_type": "dynamic", "factor": 2.0}
    else:
        model = tiny_model(family, **changes)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    gpu = plan(tmp_path, TrainSettings, "device=cuda", "rollout.max_response_tokens=8", "data.max_prompt_tokens=8")
    assert gpu.value("engine") == (PAGED if reason_against(model) is None else LAYERS)
    assert (gpu.value("engine") == PAGED) is (changes == {})
    assert plan(tmp_path).value("engine") == LAYERS


def test_the_plan_names_other_engines_too(tmp_path: Path) -> None:
    folder = qwen_folder(tmp_path / "m", "0.5b")
    assert plan(folder, TrainSettings, "device=cuda").value("engine") == "pages and graphs"
    assert plan(folder, EvalSettings, "device=cuda", "rollout.engine=vllm").value("engine") == "vllm"
    adapted = plan(folder, TrainSettings, "device=cuda", "model.lora.target_modules=[embed_tokens, q_proj]")
    assert adapted.value("engine") == "the model's own layers"
    assert "engine" not in {line.name for line in plan(folder, SftSettings, "device=cuda").lines}
