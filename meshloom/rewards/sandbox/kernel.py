"""What Linux offers to confine a process, by ctypes.

Owns: the calls, their numbers and flags. Refuses to know: which of them a sandbox uses, and in what order. Always holds: a
call that fails raises ``OSError`` with the kernel's reason; nothing here is called at import.
"""

import ctypes
import os
import platform
import struct
from functools import cache

NEW_USER, NEW_PID, NEW_NET = 0x10000000, 0x20000000, 0x40000000
NEW_IPC, NEW_UTS, NEW_MOUNTS = 0x08000000, 0x04000000, 0x00020000

READ_ONLY, NO_SUID, NO_DEVICES, NO_EXECUTE = 1, 2, 4, 8
REMOUNT, BIND, RECURSIVE, PRIVATE = 32, 4096, 16384, 1 << 18
_DETACH = 2

_DEATH_SIGNAL, _DUMPABLE, _SECCOMP, _BOUNDING_DROP, _NO_NEW_PRIVILEGES = 1, 4, 22, 24, 38
_SUBREAPER, _AMBIENT, _AMBIENT_CLEAR = 36, 47, 4
_FILTER_MODE = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_MACHINE = platform.machine()


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _word(value: int) -> ctypes.c_ulong:
    """An argument as wide as the registers that variadic calls read."""
    return ctypes.c_ulong(value & 0xFFFFFFFFFFFFFFFF)


def _prctl(option: int, value: int, what: str) -> None:
    _checked(_libc().prctl(option, _word(value), _word(0), _word(0), _word(0)), what)


def unshare(flags: int) -> None:
    """Leave namespaces for new ones."""
    _checked(_libc().unshare(flags), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    _checked(
        _libc().mount(source.encode(), target.encode(), kind.encode() or None, _word(flags), options.encode() or None),
        f"mount {target}",
    )


_ATTRIBUTES = {READ_ONLY: 1, NO_SUID: 2, NO_DEVICES: 4, NO_EXECUTE: 8}
_MOUNT_SETATTR, _HERE, _ALL_BELOW = 442, -100, 0x8000


def restrict_mount(target: str, flags: int, *, below: bool) -> None:
    """Make a mount read-only and the like, and with ``below`` all mounts beneath it."""
    attributes = struct.pack("=QQQQ", sum(value for flag, value in _ATTRIBUTES.items() if flags & flag), 0, 0, 0)
    where = _ALL_BELOW if below else 0
    call = _libc().syscall(_MOUNT_SETATTR, _HERE, target.encode(), where, attributes, _word(len(attributes)))
    _checked(call, f"mount_setattr {target}")


def pivot_root(folder: str) -> None:
    """Make a mount point the root, and let go of the old one."""
    os.chdir(folder)
    _checked(_libc().syscall(_PIVOT_ROOT[_MACHINE], b".", b"."), "pivot_root")
    _checked(_libc().umount2(b".", _DETACH), "umount")
    os.chdir("/")


def die_with_parent() -> None:
    """Be killed when the process ends that started this one. Lost when the user changes."""
    _prctl(_DEATH_SIGNAL, 9, "prctl death signal")


def set_dumpable(dumpable: bool) -> None:
    """Whether others of the same user may read this process's memory and environment."""
    _prctl(_DUMPABLE, int(dumpable), "prctl dumpable")


def adopt_orphans() -> None:
    """Become the parent of descendants whose own has ended."""
    _prctl(_SUBREAPER, 1, "prctl subreaper")


def drop_capabilities() -> None:
    """Give up all capabilities, for this process and what it executes."""
    libc = _libc()
    for capability in range(64):
        if libc.prctl(_BOUNDING_DROP, _word(capability), _word(0), _word(0), _word(0)) < 0:
            break  # past the last one, or not permitted and then of no use: no_new_privs holds either way
    libc.prctl(_AMBIENT, _word(_AMBIENT_CLEAR), _word(0), _word(0), _word(0))
    header, empty = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    _checked(libc.syscall(_CAPSET[_MACHINE], header, empty), "capset")


def forbid_new_privileges() -> None:
    """No program that is executed from now on gains rights by its file."""
    _prctl(_NO_NEW_PRIVILEGES, 1, "prctl no_new_privs")


def install_filter(program: bytes) -> None:
    """A seccomp filter for this process and its children; needs ``forbid_new_privileges``."""
    code = ctypes.create_string_buffer(program, len(program))
    table = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    buffer = ctypes.create_string_buffer(table, len(table))
    _checked(
        _libc().prctl(_SECCOMP, _word(_FILTER_MODE), _word(ctypes.addressof(buffer)), _word(0), _word(0)), "seccomp"
    )


def landlock_version() -> int:
    """Version of Landlock that the kernel has; 0: none."""
    return max(0, _libc().syscall(_LANDLOCK_CREATE, None, _word(0), _word(1)))


_READ, _ALL_FILE = 0b1101, 0b0111
"""Landlock's rights: execute, write, read a file; read a folder, and ten more that change folders."""


def landlock(readable: list[str], writable: list[str]) -> None:
    """Deny this process and its children all files but those beneath some paths; where the kernel can, TCP, signals to
    processes outside and abstract sockets too. Needs ``forbid_new_privileges``."""
    version, libc = landlock_version(), _libc()
    if not version:
        raise OSError(38, "the kernel has no Landlock")
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    rules = struct.pack("=QQQ", files, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _checked(libc.syscall(_LANDLOCK_CREATE, rules, _word(size), _word(0)), "landlock_create_ruleset")
    for path, rights in [*((one, _READ) for one in readable), *((one, files) for one in writable)]:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        wanted = rights if os.path.isdir(path) else rights & (_ALL_FILE | (files & (1 << 14)))
        rule = struct.pack("=Qi", wanted, descriptor)
        _checked(libc.syscall(_LANDLOCK_ADD, ruleset, _word(1), rule, _word(0)), f"landlock_add_rule {path}")
        os.close(descriptor)
    _checked(libc.syscall(_LANDLOCK_RESTRICT, ruleset, _word(0)), "landlock_restrict_self")
    os.close(ruleset)
