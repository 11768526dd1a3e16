"""Where a process stands in its Python code.

Owns: asking it, by py-spy where that is installed, otherwise by a signal on which the process writes its stack. Refuses to
know: what it should do. Always holds: asking has a deadline; a process that cannot answer gives an empty text.
"""

import faulthandler
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from meshloom.fabric.processes import is_stopped

_SIGNAL = signal.SIGUSR1
_DEADLINE_S = 4.0
_LOOK_S = 0.02
_MAX_FRAMES = 24
IDLE = "no verb: it waits for its next call"
_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
_SPY_FRAME = re.compile(r"\s+(?P<name>\S+) \((?P<file>.+):(?P<line>\d+)\)$")


def answer_on_signal(descriptor: int) -> None:
    """Write the stacks of all threads to an open file whenever the signal comes, even while a call into C does not return."""
    faulthandler.register(_SIGNAL, file=descriptor, all_threads=True)


def python_stack(pid: int, descriptor: int) -> list[str]:
    """Frames of a process's main thread, innermost first, such as ``all_reduce (distributed_c10d.py:2891)``.

    Args:
        pid: a process that called ``answer_on_signal``.
        descriptor: the file it writes to, open for reading.
    """
    return _by_spy(pid) or _by_signal(pid, descriptor)


def waits_in(frames: list[str]) -> str:
    """The collective operation that a stack waits in; empty if in none."""
    inside = [frame for frame in frames if "distributed_c10d.py" in frame]
    names = [frame.split()[0] for frame in inside if frame.split()[0] not in ("wrapper", "wait", "_wait")]
    return names[-1] if names else ""


def _by_spy(pid: int) -> list[str]:
    spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}") or shutil.which(
        "py-spy"
    )
    if spy is None:
        return []
    command = [spy, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    except (subprocess.TimeoutExpired, OSError):
        return []
    return spied(done.stdout, pid)


def spied(text: str, pid: int) -> list[str]:
    """Frames of the main thread in what py-spy prints; a process that knows no threads has not named it.

    Args:
        text: of ``py-spy dump``.
        pid: of the process, which is its main thread's number too.
    """
    threads = re.split(r"^Thread ", text, flags=re.M)[1:]
    main = [thread for thread in threads if '"MainThread"' in thread.partition("\n")[0] or thread.startswith(f"{pid} ")]
    return _frames(main[0], _SPY_FRAME) if main else []


def _by_signal(pid: int, descriptor: int) -> list[str]:
    before = os.fstat(descriptor).st_size
    with suppress(ProcessLookupError):
        stopped = is_stopped(pid)
        os.kill(pid, _SIGNAL)
        if stopped:
            os.kill(pid, signal.SIGCONT)  # what is stopped writes nothing; whoever asks is about to end it
    until, size = time.monotonic() + _DEADLINE_S, before
    while time.monotonic() < until:
        time.sleep(_LOOK_S)
        grown = os.fstat(descriptor).st_size
        if grown > before and grown == size:
            break
        size = grown
    text = os.pread(descriptor, 2**20, before).decode("utf-8", "replace")
    return _frames(re.split(r"^(?:Current thread|Thread) ", text, flags=re.M)[-1], _FRAME)


def _frames(text: str, pattern: re.Pattern[str]) -> list[str]:
    found = [match for line in text.splitlines() if (match := pattern.match(line))]
    frames = [f"{match['name']} ({_short(match['file'])}:{match['line']})" for match in found]
    inner = next((at for at, frame in enumerate(frames) if "fabric/worker.py" in frame), len(frames))
    own = frames[:inner][:_MAX_FRAMES]
    return own or ([IDLE] if inner < len(frames) else [])


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-2:])
