"""Processors, memory, disks and limits of this machine.

Owns: findings about them. Refuses to know: devices, packages. Always holds: nothing is written, not even to try; what a
container leaves of the machine counts. Codes: N030 to N044.
"""

import os
import platform
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil

from meshloom.config.launch_environment import LaunchEnvironment
from meshloom.doctor.findings import Report
from meshloom.doctor.needs import Needs
from meshloom.plan.amounts import format_bytes

_SHARED, _LEAST_SHARED = Path("/dev/shm"), 2**30
_FEW_FILES = 4096
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, kw_only=True)
class Host:
    """What this machine has.

    Args:
        processors: that this process may use.
        memory_bytes: of the machine, or that its container may use.
        available_bytes: that are free now.
    """

    processors: int
    memory_bytes: int
    available_bytes: int


def this_host() -> Host:
    """What this machine has, less what a container keeps from it."""
    memory = psutil.virtual_memory()
    limit = next((found for file in _MEMORY_LIMITS if (found := _limit(Path(file))) is not None), memory.total)
    total = min(memory.total, limit)
    return Host(
        processors=len(os.sched_getaffinity(0)),
        memory_bytes=total,
        available_bytes=min(memory.available, total),
    )


def _limit(file: Path) -> int | None:
    try:
        text = file.read_text("utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def examine_machine(report: Report, environment: LaunchEnvironment, needs: Needs, num_gpus: int) -> None:
    """Facts and findings about the machine."""
    host = this_host()
    report.fact("machine", "system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    report.fact("machine", "processors", f"{host.processors} that this process may use")
    free = f"{format_bytes(host.available_bytes)} available"
    report.fact("machine", "memory", f"{format_bytes(host.memory_bytes)}, {free}")
    if host.memory_bytes < psutil.virtual_memory().total:
        total = format_bytes(psutil.virtual_memory().total)
        report.note("N034", f"a container leaves {format_bytes(host.memory_bytes)} of the machine's {total}")
    _host_memory(report, host, needs)
    _disks(report, needs)
    _shared_memory(report, needs)
    _limits(report, needs)
    _threads(report, environment, host, needs, num_gpus)


def _host_memory(report: Report, host: Host, needs: Needs) -> None:
    wanted = needs.offload_bytes + needs.weights_bytes
    if wanted <= host.memory_bytes:
        return
    what = f"the run wants {format_bytes(wanted)} of the host's memory, and there are {format_bytes(host.memory_bytes)}"
    offload = f", {format_bytes(needs.offload_bytes)} are kept there by offload" if needs.offload_bytes else ""
    why = f"the weights pass through it in float32{offload}"
    fix = (
        "offload.ROLE.…=disk, or machines with more"
        if needs.offload_bytes
        else "a smaller model, or machines with more"
    )
    report.warn("N030", what, where="offload" if needs.offload_bytes else "model.path", why=why, fix=fix)


def _disks(report: Report, needs: Needs) -> None:
    folder = _existing(needs.run_dir or Path.cwd())
    free = psutil.disk_usage(str(folder)).free
    report.fact("machine", "disk", f"{format_bytes(free)} free at {folder}")
    if needs.run_dir is None:
        return
    _can_be_made(report, needs.run_dir, folder)
    one, several = needs.checkpoint_bytes, needs.checkpoint_bytes * (needs.checkpoints + 1)
    if one > free:
        what = f"a checkpoint takes about {format_bytes(one)}, and {format_bytes(free)} are free at {folder}"
        report.require("N032", what, where="run_dir", fix="another run_dir, or free some")
    elif several > free:
        what = f"{needs.checkpoints} checkpoints and one that is written take about {format_bytes(several)}"
        fix = "fewer of them (checkpoint.keep_last, checkpoint.keep_best), another run_dir, or free some"
        report.warn("N033", f"{what}; {format_bytes(free)} are free at {folder}", where="checkpoint", fix=fix)
    if needs.offload_dir is not None:
        there = _existing(needs.offload_dir)
        left = psutil.disk_usage(str(there)).free
        report.fact("machine", "disk for offload", f"{format_bytes(left)} free at {there}")
        if needs.disk_offload_bytes > left:
            what = (
                f"offload keeps {format_bytes(needs.disk_offload_bytes)} on the disk, and {format_bytes(left)} are free"
            )
            report.require("N035", f"{what} at {there}", where="offload.folder", fix="another offload.folder")


def _can_be_made(report: Report, run_dir: Path, above: Path) -> None:
    """Whether the folder of a run is one, or can be made in the one above it."""
    run_dir = run_dir.absolute()
    file = next((each for each in (run_dir, *run_dir.parents) if each.exists() and not each.is_dir()), None)
    if file is not None:
        report.require(
            "N031", f"{run_dir} cannot be a folder: {file} is a file", where="run_dir", fix="another run_dir"
        )
    elif not os.access(above, os.W_OK):
        report.require("N031", f"nothing can be written in {above}", where="run_dir", fix="another run_dir")


def _existing(folder: Path) -> Path:
    """The folder itself or the nearest one above it that is there."""
    folder = folder.absolute()
    return next((each for each in (folder, *folder.parents) if each.is_dir()), Path("/"))


def _shared_memory(report: Report, needs: Needs) -> None:
    if not _SHARED.is_dir():
        return
    usage = psutil.disk_usage(str(_SHARED))
    report.fact("machine", str(_SHARED), f"{format_bytes(usage.total)}, {format_bytes(usage.free)} free")
    if usage.free < _LEAST_SHARED and (needs.devices_per_node > 1 or usage.total <= 2**26):
        why = "processes of a node, and NCCL between them, exchange through it"
        fix = "in Docker: --shm-size=16g or --ipc=host; in Kubernetes: an emptyDir of medium Memory there"
        report.warn("N036", f"{_SHARED} has {format_bytes(usage.free)} free", why=why, fix=fix)


def _limits(report: Report, needs: Needs) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    report.fact("machine", "open files", f"{_count(soft)} (at most {_count(hard)})")
    unlimited = locked == resource.RLIM_INFINITY
    report.fact("machine", "locked memory", "unlimited" if unlimited else format_bytes(locked))
    if 0 <= soft < _FEW_FILES:
        fix = f"ulimit -n {hard if 0 < hard < 65536 else 65536}"
        report.warn("N040", f"a process may open {soft} files", why="shards, workers and sockets are files", fix=fix)
    if not unlimited and (needs.offload_bytes or needs.nodes > 1):
        why = "pinned memory for offload, and RDMA between nodes, is locked"
        fix = "ulimit -l unlimited; in Docker: --ulimit memlock=-1"
        report.warn("N041", f"a process may lock {format_bytes(locked)} of memory", why=why, fix=fix)


def _count(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _threads(report: Report, environment: LaunchEnvironment, host: Host, needs: Needs, num_gpus: int) -> None:
    given = environment.threads
    for name, value in given.items():
        report.fact("machine", name, value)
    threads = given.get("OMP_NUM_THREADS", "")
    processes = needs.devices_per_node
    if threads.isdecimal() and int(threads) > max(1, host.processors // processes):
        what = f"OMP_NUM_THREADS={threads} for each of {processes} processes is more than {host.processors} processors"
        report.warn(
            "N042", what, where="OMP_NUM_THREADS", fix=f"OMP_NUM_THREADS={max(1, host.processors // processes)}"
        )
    if given.get("OMP_WAIT_POLICY", "").lower() == "active":
        why = "threads that wait by spinning take processors from those that work"
        report.warn(
            "N043", "OMP_WAIT_POLICY is active", where="OMP_WAIT_POLICY", why=why, fix="unset it, or set it to passive"
        )
    if num_gpus and host.processors < 2 * min(num_gpus, processes):
        what = f"{host.processors} processors for {min(num_gpus, processes)} GPUs"
        why = "each GPU's process needs one to launch kernels, and rewards and data need more"
        report.warn("N044", what, why=why, fix="ask for more processors (--cpus-per-task in SLURM)")
