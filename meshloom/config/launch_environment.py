"""What the environment says of how this process was launched: by a scheduler, by torchrun, with which devices and threads.

Owns: reading those variables. Refuses to know: whether what they say is true. Always holds: a variable that is set but empty
counts as not set; nothing is set here.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_HOST_FILES = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE")
_SLURM_NAMES = (
    "SLURM_JOB_ID",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_GPUS_ON_NODE",
    "SLURM_CPUS_ON_NODE",
)
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_LIBRARIES = (
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUDA_LAUNCH_BLOCKING",
    "HF_HOME",
    "HF_HUB_OFFLINE",
)


@dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """Variables by their names, as far as they are set.

    Args:
        slurm: of SLURM.
        torchrun: of torchrun and of whoever speaks like it.
        host_files: that name files of hosts, as PBS, LSF and Grid Engine set them.
        threads: of the libraries that compute on the processor.
        libraries: of NCCL, PyTorch and Hugging Face that change how a run behaves.
        visible_devices: entries of ``CUDA_VISIBLE_DEVICES``; none if it is not set at all.
    """

    slurm: Mapping[str, str]
    torchrun: Mapping[str, str]
    host_files: Mapping[str, str]
    threads: Mapping[str, str]
    libraries: Mapping[str, str]
    visible_devices: tuple[str, ...] | None


def launch_environment() -> LaunchEnvironment:
    """What the environment of this process says."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return LaunchEnvironment(
        slurm=_set(*_SLURM_NAMES),
        torchrun=_set(*TORCHRUN),
        host_files=_set(*_HOST_FILES),
        threads=_set(*_THREADS),
        libraries=_set(*_LIBRARIES),
        visible_devices=None if listed is None else tuple(name.strip() for name in listed.split(",") if name.strip()),
    )


def _set(*names: str) -> dict[str, str]:
    return {name: os.environ[name] for name in names if os.environ.get(name)}
