"""What a machine's GPUs are to a run.

Owns: findings about devices. Refuses to know: how the driver is asked. Codes: N010 to N020.
"""

from collections.abc import Sequence

from meshloom.config.launch_environment import LaunchEnvironment
from meshloom.doctor.findings import Report
from meshloom.doctor.gpus import Gpu, Gpus, links_in_words
from meshloom.doctor.needs import Needs
from meshloom.doctor.packages import at_least, version_of
from meshloom.plan.amounts import format_bytes
from meshloom.plan.hardware import find_device

_TAKEN = 2**30
"""Bytes of a GPU that may be taken before it counts as in use."""
_CUDA_BUILDS = {"cu126": "12.6", "cu128": "12.8", "cu129": "12.9", "cu130": "13.0", "cu132": "13.2"}


def examine_devices(report: Report, gpus: Gpus, environment: LaunchEnvironment, needs: Needs) -> None:
    """Facts and findings about devices."""
    seen = gpus.visible(environment.visible_devices)
    _facts(report, gpus, seen)
    if gpus.trouble:
        tell = report.require if needs.gpu and not gpus.found else report.warn
        tell("N017", f"the driver does not tell of the GPUs: {gpus.trouble}", fix="install or repair NVIDIA's driver")
    _count(report, gpus, seen, environment, needs)
    _memory(report, seen, needs)
    _kinds(report, seen, needs)
    _torch(report, gpus, seen, needs)
    if needs.tensor > 1 and gpus.links and not any(kind.startswith("NV") for kind in gpus.links.values()):
        what = f"layers are split over {needs.tensor} devices, which are not joined by NVLink"
        why = "they exchange every layer's results over PCIe"
        report.warn("N019", what, where="parallel", why=why, fix="split them less: parallel.ROLE.tensor=1")


def _facts(report: Report, gpus: Gpus, seen: Sequence[Gpu]) -> None:
    if not gpus.found:
        report.fact("devices", "GPUs", "none")
        return
    for gpu in gpus.found:
        memory = "" if gpu.memory_bytes is None else f", {format_bytes(gpu.memory_bytes)}"
        used = "" if gpu.used_bytes is None else f", {format_bytes(gpu.used_bytes)} in use"
        hidden = "" if gpu in seen else ", hidden by CUDA_VISIBLE_DEVICES"
        known = find_device(gpu.name)
        plan = "" if known is None else f" (cluster.device={known.name.lower().replace(' ', '-')})"
        report.fact("devices", f"GPU {gpu.index}", f"{gpu.name}{plan}{memory}{used}{hidden}")
    if gpus.driver:
        report.fact("devices", "driver", gpus.driver + (f", up to CUDA {gpus.cuda}" if gpus.cuda else ""))
    if gpus.links:
        report.fact("devices", "links", links_in_words(gpus.links))


def _count(report: Report, gpus: Gpus, seen: Sequence[Gpu], environment: LaunchEnvironment, needs: Needs) -> None:
    names = environment.visible_devices
    if names is not None and len(seen) < len(names):
        stranger = names[len(seen)]
        what = f"CUDA_VISIBLE_DEVICES names {stranger!r}, which is no GPU of this machine"
        have = ", ".join(str(gpu.index) for gpu in gpus.found) or "none"
        why = "CUDA sees no device from the first name on that is none"
        report.warn("N020", what, why=why, fix=f"name only GPUs that are there: {have}")
    if not needs.gpu:
        return
    if not seen:
        hidden = f"; CUDA_VISIBLE_DEVICES hides {len(gpus.found)}" if gpus.found else ""
        what = f"the run computes on GPUs, and this machine has none{hidden}"
        report.require("N010", what, where="device", fix="run it where there are some, or set device=cpu")
    elif len(seen) < needs.devices_per_node:
        what = f"the run takes {needs.devices_per_node} devices of each node, and this one has {len(seen)}"
        fix = f"set cluster.devices_per_node={len(seen)}, or take machines with more"
        report.require("N011", what, where="cluster.devices_per_node", fix=fix)


def _memory(report: Report, seen: Sequence[Gpu], needs: Needs) -> None:
    least = min((gpu.memory_bytes for gpu in seen if gpu.memory_bytes is not None), default=None)
    if needs.gpu and least is not None and needs.device_bytes is not None and least < needs.device_bytes:
        planned = format_bytes(needs.device_bytes)
        what = f"the run is planned for {planned} on each device; the smallest has {format_bytes(least)}"
        report.require(
            "N012", what, where="device_memory_bytes", fix=f"set device_memory_bytes={least}, and plan again"
        )
    for gpu in seen:
        if gpu.used_bytes is not None and gpu.used_bytes > _TAKEN:
            what = f"{format_bytes(gpu.used_bytes)} of GPU {gpu.index} are in use"
            fix = "nvidia-smi tells which processes; end them, or hide the device with CUDA_VISIBLE_DEVICES"
            report.warn("N013", what, where=f"GPU {gpu.index}", fix=fix)


def _kinds(report: Report, seen: Sequence[Gpu], needs: Needs) -> None:
    names = list(dict.fromkeys(gpu.name for gpu in seen))
    if len(names) > 1:
        why = "the slowest of them sets the pace, the smallest the memory"
        report.warn("N014", f"the GPUs are of several kinds: {', '.join(names)}", why=why)
    meant = None if needs.device_kind is None else find_device(needs.device_kind)
    here = {found.name for name in names if (found := find_device(name)) is not None}
    if meant is not None and here and meant.name not in here:
        what = f"the run is planned for {meant.name}, and this machine has {', '.join(sorted(here))}"
        kind = sorted(here)[0].lower().replace(" ", "-")
        report.warn("N018", what, where="cluster.device", fix=f"set cluster.device={kind}, and plan again")


def _torch(report: Report, gpus: Gpus, seen: Sequence[Gpu], needs: Needs) -> None:
    """Whether the PyTorch that is installed can use them; its version says what it was built for."""
    version = version_of("torch")
    if version is None or not seen:
        return
    built = version.partition("+")[2]
    tell = report.require if needs.gpu else report.warn
    if built == "cpu":
        fix = "pip install torch, from the index of a CUDA build"
        tell("N015", f"there are GPUs, and PyTorch {version} is a build for processors", fix=fix)
    needed = _CUDA_BUILDS.get(built, "")
    if gpus.cuda and needed and not at_least(gpus.cuda, needed.partition(".")[0]):
        what = f"PyTorch {version} is built for CUDA {needed}, and the driver {gpus.driver} runs up to CUDA {gpus.cuda}"
        tell("N016", what, fix="a newer driver, or a PyTorch that is built for an older CUDA")
