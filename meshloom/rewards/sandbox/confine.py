"""Walls around a program: a small read-only root, namespaces, another user, limits.

Owns: how each wall is put up. Refuses to know: programs, tests. Always holds: what cannot be put up raises ``OSError``, so that
no program starts with fewer walls than were found at the start.
"""

import os
import resource
import stat
import sys
from collections.abc import Iterable
from contextlib import suppress

from meshloom.rewards.sandbox import kernel
from meshloom.rewards.sandbox.limits import Limits, Means
from meshloom.rewards.sandbox.syscalls import filter_program

FOLDER = "/sandbox"
"""The program's own folder where it has a root of its own."""
INNER_USER = 1000
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
_DEVICES = ("null", "full", "random", "urandom")
"""Without ``zero``: a shared mapping of it is memory that no look at a process shows."""
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
_STAGE = "/sys"
"""Where the new root is put together: a folder that each system has and none needs for this."""
_STACK_BYTES = 64 * 2**20
_SERVER_PROCESSES = 2
"""Processes of the sandbox itself that count for the user in its namespace: the supervisor and that one's parent."""


def readable_paths() -> list[str]:
    """What a program may read: the interpreter, its packages, the system's libraries; no path beneath another."""
    wanted = [*_SYSTEM, sys.base_prefix, sys.prefix, *_SYSTEM_FILES]
    found = sorted({path for path in wanted if os.path.exists(path)})
    return [path for path in found if not any(path.startswith(f"{other}/") for other in found)]


def enter_root(paths: Iterable[str]) -> None:
    """Make a root that holds copies of some paths, read-only, and nothing else; needs a mount namespace of one's own."""
    kernel.mount("none", "/", flags=kernel.PRIVATE | kernel.RECURSIVE)
    kernel.mount("sandbox", _STAGE, "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES, "mode=755,size=1m")
    paths = list(paths)
    for path in paths:
        _bind(path)
    os.makedirs(f"{_STAGE}/dev", exist_ok=True)
    for name in _DEVICES:
        _place(f"/dev/{name}", is_folder=False)
        kernel.mount(f"/dev/{name}", f"{_STAGE}/dev/{name}", flags=kernel.BIND)
    for name, target in {**_LINKS, "shm": FOLDER}.items():
        os.symlink(target, f"{_STAGE}/dev/{name}")
    _place("/proc", is_folder=True)
    kernel.mount("/proc", f"{_STAGE}/proc", flags=kernel.BIND | kernel.RECURSIVE)
    os.mkdir(f"{_STAGE}{FOLDER}", 0o777)
    if not any(path.startswith("/tmp") for path in paths):
        os.symlink(FOLDER, f"{_STAGE}/tmp")
    kernel.restrict_mount(_STAGE, kernel.READ_ONLY, below=False)
    kernel.pivot_root(_STAGE)


def _place(path: str, *, is_folder: bool) -> None:
    target = f"{_STAGE}{path}"
    os.makedirs(target if is_folder else os.path.dirname(target), mode=0o755, exist_ok=True)
    if not is_folder:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))


def _bind(path: str) -> None:
    if os.path.islink(path) and path in _SYSTEM:
        os.symlink(os.readlink(path), f"{_STAGE}{path}")
        return
    _place(path, is_folder=os.path.isdir(path))
    kernel.mount(os.path.realpath(path), f"{_STAGE}{path}", flags=kernel.BIND | kernel.RECURSIVE)
    flags = kernel.READ_ONLY | kernel.NO_SUID | kernel.NO_DEVICES
    kernel.restrict_mount(f"{_STAGE}{path}", flags, below=True)


def enter_namespaces(flags: int, inner: int) -> None:
    """Enter new namespaces, a user namespace among them, as user ``inner`` there; outside the user stays what it was."""
    user, group = os.getuid(), os.getgid()
    kernel.set_dumpable(True)  # files of a process that changed its user belong to root until then
    kernel.unshare(flags | kernel.NEW_USER)
    maps = (("setgroups", "deny"), ("uid_map", f"{inner} {user} 1"), ("gid_map", f"{inner} {group} 1"))
    for name, text in maps:
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def own_folder(limits: Limits) -> None:
    """Mount the program's folder and its view of processes; for the first process of fresh namespaces."""
    options = f"size={limits.disk_bytes},nr_inodes={max(256, limits.disk_bytes // 4096)},mode=755"
    kernel.mount("sandbox", FOLDER, "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES, options)
    hidden = kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXECUTE
    try:
        kernel.mount("proc", "/proc", "proc", hidden)
    except OSError:  # a container that hides parts of its own: then there is none at all
        kernel.mount("none", "/proc", "tmpfs", hidden | kernel.READ_ONLY, "size=4k")
    os.chdir(FOLDER)


def set_limits(limits: Limits, means: Means) -> None:
    """Bounds that the kernel keeps for each process.

    Args:
        limits: the program's.
        means: whether its user runs nothing else, so that the kernel can count processes by user.
    """
    cpu_s = int(limits.cpu_s) + 2  # the supervisor is more exact; this holds without it
    bounds = {
        resource.RLIMIT_AS: limits.memory_bytes,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: limits.disk_bytes,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 2**16,
    }
    if means.namespaces:
        bounds[resource.RLIMIT_NPROC] = limits.processes + _SERVER_PROCESSES
    elif means.own_user is not None:
        bounds[resource.RLIMIT_NPROC] = limits.processes
    for name, value in bounds.items():
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    deep = _STACK_BYTES if hard == resource.RLIM_INFINITY else min(_STACK_BYTES, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_STACK, (deep, deep))


def become(user: int) -> None:
    """Become another user, without any group of the old one."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def give_up_rights(means: Means, folder: str) -> None:
    """The last walls, from the inside: after this nothing can be undone."""
    if means.own_user is not None and os.getuid() == 0:
        become(means.own_user)
    kernel.drop_capabilities()
    kernel.forbid_new_privileges()
    kernel.set_dumpable(True)  # the change of rights has undone it
    if means.landlock:
        devices = [f"/dev/{name}" for name in _DEVICES]
        kernel.landlock(readable_paths(), [folder, *devices])
    if means.filter:
        contained = means.namespaces or means.own_user is not None
        kernel.install_filter(filter_program(None if contained else os.getpid()))


def remove_folder(path: str) -> None:
    """Remove a folder and what is in it, whatever rights a program left there; links are not followed."""
    for root, folders, _ in os.walk(path, topdown=True):
        for name in folders:
            inner = os.path.join(root, name)
            if not stat.S_ISLNK(os.lstat(inner).st_mode):
                with suppress(OSError):
                    os.chmod(inner, 0o700)
    import shutil

    shutil.rmtree(path, ignore_errors=True)
