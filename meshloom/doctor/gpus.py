"""The GPUs of this machine, as its driver tells of them.

Owns: asking ``nvidia-smi``, and reading ``/proc`` and ``/sys`` where there is none. Refuses to know: what a run needs. Always
holds: torch is not loaded and no device is touched; what the driver does not say is not known, never guessed.
"""

import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_QUERY = ("index", "name", "memory.total", "memory.used", "driver_version", "uuid")
_MIB = 2**20
_LONGEST_S = 10.0
_LINKS = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "a PCIe host bridge",
    "NODE": "bridges of one processor",
    "SYS": "the link between processors",
}
"""What ``nvidia-smi topo -m`` calls the ways between devices, nearest first."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU.

    Args:
        index: as the driver counts, before ``CUDA_VISIBLE_DEVICES``.
        name: by the driver.
        memory_bytes: that it has; none if the driver does not say.
        used_bytes: that are taken now; none likewise.
        uuid: its own name; empty if that is not known.
    """

    index: int
    name: str
    memory_bytes: int | None = None
    used_bytes: int | None = None
    uuid: str = ""

    @property
    def free_bytes(self) -> int | None:
        """What is free now."""
        if self.memory_bytes is None or self.used_bytes is None:
            return self.memory_bytes
        return self.memory_bytes - self.used_bytes


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """All GPUs of this machine.

    Args:
        found: in the driver's order.
        driver: its version; empty if that is not known.
        cuda: the newest CUDA that the driver runs; empty if that is not known.
        links: ways between each two of them, as the driver calls them; empty if that is not known.
        trouble: why the driver did not answer although there are devices; empty if it did.
    """

    found: tuple[Gpu, ...] = ()
    driver: str = ""
    cuda: str = ""
    links: dict[tuple[int, int], str] | None = None
    trouble: str = ""

    def visible(self, names: tuple[str, ...] | None) -> tuple[Gpu, ...]:
        """Those that ``CUDA_VISIBLE_DEVICES`` leaves, in its order; as CUDA does, up to the first name that is none."""
        if names is None:
            return self.found
        seen: list[Gpu] = []
        for name in names:
            match = [gpu for gpu in self.found if str(gpu.index) == name or (gpu.uuid and gpu.uuid.startswith(name))]
            if not match:
                break
            seen.append(match[0])
        return tuple(seen)


def find_gpus() -> Gpus:
    """The GPUs of this machine."""
    if (program := shutil.which("nvidia-smi")) is not None:
        return _ask(program)
    nvidia = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    if nvidia:
        names = [_field(file, "Model") or "an NVIDIA GPU" for file in nvidia]
        version = re.search(r"Kernel Module\s+(\S+)", _text(Path("/proc/driver/nvidia/version")))
        found = tuple(Gpu(index=index, name=name) for index, name in enumerate(names))
        trouble = "nvidia-smi is not on the PATH, so memory and links are not known"
        return Gpus(found=found, driver=version[1] if version else "", trouble=trouble)
    return Gpus(found=tuple(_amd()))


def _amd() -> list[Gpu]:
    """AMD's, by what their driver says in ``/sys``."""
    if not Path("/dev/kfd").exists():
        return []
    totals = sorted(Path("/sys/class/drm").glob("card*/device/mem_info_vram_total"))
    used = [_number(file.with_name("mem_info_vram_used")) for file in totals]
    return [
        Gpu(index=index, name="an AMD GPU", memory_bytes=_number(file), used_bytes=used[index])
        for index, file in enumerate(totals)
    ]


def _ask(program: str) -> Gpus:
    """What ``nvidia-smi`` says; all questions at once, as each takes it a while to start."""
    query = [program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    asked = [_start(query), _start([program, "topo", "-m"]), _start([program])]
    answers = [_answer(process) for process in asked]
    (code, listed), (topo_code, matrix), (_, overview) = answers
    if code:
        return Gpus(trouble=f"nvidia-smi failed: {_first_line(listed) or f'exit code {code}'}")
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.splitlines() if line.count(",") == 5]
    found = tuple(_gpu(row) for row in rows if row[0].isdecimal())
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", overview)
    return Gpus(
        found=found,
        driver=rows[0][4] if rows else "",
        cuda=cuda[1] if cuda else "",
        links=read_links(matrix) if not topo_code else None,
    )


def _gpu(row: list[str]) -> Gpu:
    index, name, total, used, _, uuid = row
    return Gpu(index=int(index), name=name, memory_bytes=_mib(total), used_bytes=_mib(used), uuid=uuid)


def _mib(text: str) -> int | None:
    """Bytes of a number of MiB; none for what the driver calls ``[N/A]``."""
    return int(float(text) * _MIB) if re.fullmatch(r"\d+(\.\d+)?", text) else None


def read_links(matrix: str) -> dict[tuple[int, int], str] | None:
    """Ways between each two GPUs, from the table of ``nvidia-smi topo -m``; none if it is no such table."""
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in matrix.splitlines()]
    heads = next((line.split() for line in lines if line.split()[:1] == ["GPU0"] and "X" not in line.split()), None)
    if heads is None:
        return None
    columns = [int(head[3:]) for head in heads if re.fullmatch(r"GPU\d+", head)]
    found: dict[tuple[int, int], str] = {}
    for line in lines:
        cells = line.split()
        if len(cells) > len(columns) and re.fullmatch(r"GPU\d+", cells[0]) and cells[0:2] != ["GPU0", "GPU1"]:
            row = int(cells[0][3:])
            found |= {(row, column): cell for column, cell in zip(columns, cells[1:], strict=False) if row < column}
    return found


def links_in_words(links: dict[tuple[int, int], str]) -> str:
    """``NV18 (NVLink) between all pairs``, or each way with the number of its pairs."""
    counts = Counter(links.values())
    if len(counts) == 1:
        return f"{_way(next(iter(counts)))} between all pairs"
    return ", ".join(f"{_way(kind)} between {count} pairs" for kind, count in counts.most_common())


def _way(kind: str) -> str:
    words = next((words for start, words in _LINKS.items() if kind.startswith(start)), "")
    return f"{kind} ({words})" if words else kind


def _start(command: list[str]) -> subprocess.Popen[str] | None:
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    except OSError:
        return None


def _answer(process: "subprocess.Popen[str] | None") -> tuple[int, str]:
    """Exit code and output; a driver that hangs is no answer."""
    if process is None:
        return 127, "it cannot be started"
    try:
        output, _ = process.communicate(timeout=_LONGEST_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return 124, f"no answer in {_LONGEST_S:g} s"
    return process.returncode, output


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8", "replace")
    except OSError:
        return ""


def _field(file: Path, name: str) -> str:
    found = re.search(rf"^{name}:\s*(.+)$", _text(file), re.MULTILINE)
    return found[1].strip() if found else ""


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None
