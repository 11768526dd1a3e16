"""The process environment: the one place that reads or sets environment variables.

Owns: thread and library switches that must stand before torch is imported, and the few variables a user may set.
Refuses to know: settings of a run. Always holds: what the user set in the environment wins.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# OpenMP's waiting threads spin by default; on few cores that makes small models five to fifty times slower.
_BEFORE_TORCH = {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


def prepare_process() -> None:
    """Set what must stand before torch is imported. Does nothing once torch is loaded, since it would be too late."""
    if "torch" in sys.modules:
        return
    for name, value in _BEFORE_TORCH.items():
        os.environ.setdefault(name, value)


def threads_are_given() -> bool:
    """Whether the user has said how many threads a process computes with."""
    return "OMP_NUM_THREADS" in os.environ or "MKL_NUM_THREADS" in os.environ


def visible_gpus() -> int | None:
    """How many GPUs ``CUDA_VISIBLE_DEVICES`` leaves this process; none if it does not say."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if listed is None else len([name for name in listed.split(",") if name.strip()])


# vLLM reads these when it is imported. The engine must run in this process, where the trainer's weights are; FlashInfer's
# sampler neither takes a seed for each sample nor gives log-probs of the distribution it samples.
_BEFORE_VLLM = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def prepare_vllm() -> None:
    """Set what must stand before vLLM is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in _BEFORE_VLLM.items():
        os.environ.setdefault(name, value)


_COMPILERS_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@contextmanager
def compilers_folders_kept() -> Iterator[None]:
    """Afterwards compilers keep what they make where they did before. vLLM leads them into a folder of its own, for good; the
    trainer's code would be looked for there too."""
    before = {name: os.environ.get(name) for name in _COMPILERS_FOLDERS}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def verl_offload() -> dict[str, str]:
    """What the environment says about where verl offloads to: ``VERL_OFFLOAD_DIR``, ``VERL_OFFLOAD_DEVICE``, as far as set."""
    return {name: os.environ[name] for name in ("VERL_OFFLOAD_DIR", "VERL_OFFLOAD_DEVICE") if name in os.environ}


def offload_folder() -> str | None:
    """Folder for what goes to disk where the settings name none: ``VERL_OFFLOAD_DIR``, if it is set and not empty."""
    return os.environ.get("VERL_OFFLOAD_DIR") or None


def is_set(variable: str) -> bool:
    """Whether a variable is there and not empty."""
    return bool(os.environ.get(variable))


def secret(variable: str) -> str:
    """The value of a variable that holds the key of a service. It is for the service's requests alone.

    Raises:
        KeyError: if it is not set, or empty.
    """
    if not is_set(variable):
        raise KeyError(variable)
    return os.environ[variable]


def prepare_gloo(interface: str) -> None:
    """Let gloo use a network interface, unless the user has named one. It would take the one that this machine's name leads
    to, which often is the loopback."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def worker_environment(*, threads: int | None, one_node: bool) -> dict[str, str]:
    """The environment of a worker process: this one's, and what must stand before the worker imports torch.

    Args:
        threads: that a worker computes with, unless the user has said how many; none: as many as the libraries take.
        one_node: all workers are on this machine, so that they need no other network than its own.
    """
    environment = _without_launcher(dict(os.environ))
    environment |= {name: value for name, value in _BEFORE_TORCH.items() if name not in environment}
    environment["PYTHONUNBUFFERED"] = "1"
    if threads is not None and not threads_are_given():
        environment["OMP_NUM_THREADS"] = str(threads)
    if one_node:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


_OF_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ENVIRONMENT",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MESHLOOM_NODE",
)
_PREFIXES_OF_LAUNCHERS = ("TORCHELASTIC_", "SLURM_")
_CONTROLLER = "MESHLOOM_CONTROLLER"


def launcher_variables() -> dict[str, str]:
    """What a launcher of several processes has set: torchrun's variables and SLURM's, and ``MESHLOOM_NODE``, which names this
    machine where its host name is not what the device map calls it."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _OF_LAUNCHERS or name.startswith(_PREFIXES_OF_LAUNCHERS)
    }


def controller_environment(ticket: str) -> dict[str, str]:
    """The environment of the process that runs the loop, where a launcher has started this one.

    It does not say that there are several processes: libraries would take each other's places for their own.

    Args:
        ticket: what ``take_controller_ticket`` returns there.
    """
    return _without_launcher(dict(os.environ)) | {_CONTROLLER: ticket}


def take_controller_ticket() -> str | None:
    """What ``controller_environment`` was given, once: processes that this one starts do not see it."""
    return os.environ.pop(_CONTROLLER, None)


def _without_launcher(environment: dict[str, str]) -> dict[str, str]:
    """Without what torchrun has set. SLURM's variables stay, since its own commands need them."""
    return {
        name: value
        for name, value in environment.items()
        if name == "ENVIRONMENT" or name.startswith("SLURM_") or name not in launcher_variables()
    }
