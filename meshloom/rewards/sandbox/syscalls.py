"""The filter of system calls that a program runs under.

Owns: which calls are denied, and the BPF program that says so. Refuses to know: how it is installed. Always holds: a call
of another architecture ends the process; a denied call fails with an error and the program goes on.
"""

import platform
import struct
from functools import cache

NETWORK_ERRNO, DENIED_ERRNO, UNKNOWN_ERRNO = 101, 1, 38
"""ENETUNREACH for sockets, EPERM for what is denied, ENOSYS where the C library then takes an older call."""

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_ROW = {"x86_64": 0, "aarch64": 1}

_SOCKET, _CLONE, _CLONE3 = (41, 198), (56, 220), (435, 435)

_DENIED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "chroot": (161, 51),
    "pivot_root": (155, 41),
    "mount": (165, 40),
    "umount2": (166, 39),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "mknodat": (259, 33),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "personality": (135, 92),
    "sethostname": (170, 161),
}
"""Denied calls with their numbers on x86-64 and ARM64: other processes' memory, namespaces and mounts, memory that outlives
or hides from a process, and what only an administrator needs."""
_DENIED_X86 = {"mknod": 133, "iopl": 172, "ioperm": 173, "modify_ldt": 154}

_MMAP, _MAP_SHARED, _MAP_ANONYMOUS = (9, 222), 0x01, 0x20
"""A mapping that is both has no file whose size is bounded, and its pages stay when no process holds them."""
_FOR_ITSELF_ONLY = {
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
}
"""Permitted for process 0, the caller: others of its user, the one that watches it among them, would obey."""
_SIGNALS_TO_ONE = {"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131)}
_OTHER_SIGNALS = {"rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424)}
_NEW_NAMESPACES = 0x7E020000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000


@cache
def filter_program(signals_only_to: int | None = None) -> bytes:
    """The BPF program for this machine.

    Args:
        signals_only_to: the only process that may be sent signals; none: any that the program can see.

    Raises:
        OSError: for an architecture whose numbers are not known.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(UNKNOWN_ERRNO, f"system calls of {machine} are not known")
    row = _ROW[machine]
    code = [_step(_LOAD, 4), _step(_EQUAL, _ARCHITECTURES[machine], 1, 0), _step(_RETURN, _KILL), _step(_LOAD, 0)]
    if machine == "x86_64":
        code += [_step(_AT_LEAST, 0x40000000, 0, 1), _step(_RETURN, _ERROR | DENIED_ERRNO)]
    errors = {_SOCKET[row]: NETWORK_ERRNO, _CLONE3[row]: UNKNOWN_ERRNO}
    errors |= {numbers[row]: DENIED_ERRNO for numbers in _DENIED.values()}
    if machine == "x86_64":
        errors |= dict.fromkeys(_DENIED_X86.values(), DENIED_ERRNO)
    if signals_only_to is not None:
        errors |= {numbers[row]: DENIED_ERRNO for numbers in _OTHER_SIGNALS.values()}
    for number, error in errors.items():
        code += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _ERROR | error)]
    denied = _step(_RETURN, _ERROR | DENIED_ERRNO)
    code += [_step(_EQUAL, _CLONE[row], 0, 4), _step(_LOAD, 16), _step(_ANY_BIT, _NEW_NAMESPACES, 0, 1), denied]
    code += [_step(_RETURN, _ALLOW)]
    code += [_step(_EQUAL, _MMAP[row], 0, 5), _step(_LOAD, 40), _step(_ANY_BIT, _MAP_ANONYMOUS, 0, 2)]
    code += [_step(_ANY_BIT, _MAP_SHARED, 0, 1), denied, _step(_RETURN, _ALLOW)]
    for numbers in _FOR_ITSELF_ONLY.values():
        code += [_step(_EQUAL, numbers[row], 0, 4), _step(_LOAD, 16), _step(_EQUAL, 0, 1, 0)]
        code += [denied, _step(_RETURN, _ALLOW)]
    for numbers in _SIGNALS_TO_ONE.values() if signals_only_to is not None else ():
        code += [_step(_EQUAL, numbers[row], 0, 4), _step(_LOAD, 16), _step(_EQUAL, signals_only_to or 0, 1, 0)]
        code += [denied, _step(_RETURN, _ALLOW)]
    return b"".join([*code, _step(_RETURN, _ALLOW)])


def _step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, value)
