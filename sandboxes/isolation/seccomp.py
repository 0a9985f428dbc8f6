"""Which system calls code in a sandbox may make: a seccomp filter, as bubblewrap's ``--seccomp`` takes it.

What ordinary programs never need and what kernels were broken through is refused: namespaces, mounts, tracing, key
rings, bpf, io_uring, performance counters, modules, clocks, odd socket families, typing into terminals. A call newer
than those reviewed here does not exist inside, so that a newer kernel opens nothing. Calls of another architecture
(i386, x32) end the process: their numbers would go round the filter.

The program is assembled here, because it is small and pure (tests run it in an interpreter) and the alternatives ask
for more than they give: the Python bindings of libseccomp had their last release in 2021, and the library, where a
host has it at all, knows no call by name that is younger than itself. Sources: seccomp(2), linux/filter.h,
linux/bpf_common.h, and the kernel's system call tables for x86_64 and arm64 (asm-generic).
"""

from __future__ import annotations

import enum
import errno
import os
import platform
import struct
from collections.abc import Sequence
from functools import cache

from envfarm.core.errors import IsolationError

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LAST_REVIEWED = 466  # removexattrat, Linux 6.13
_X32 = 0x40000000
_NR, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_EQUAL, _GREATER, _AT_LEAST, _ANY_BIT = 0x15, 0x25, 0x35, 0x45

_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}
_TERMINAL_REQUESTS = (0x5412, 0x541C, 0x5423)  # TIOCSTI, TIOCLINUX, TIOCSETD
_PERSONALITIES = (0, 0x0008, 0x20000, 0x20008, 0xFFFFFFFF)  # LINUX, LINUX32, both with UNAME26, and to ask
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
_TYPES = (1, 2)  # SOCK_STREAM, SOCK_DGRAM
_PROTOCOLS = (0, 1, 6, 17, 58)  # the type's own, ICMP (ping), TCP, UDP, ICMPv6

# (x86_64, arm64); None: not a call there.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # namespaces and file systems
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "statmount": (457, 457), "listmount": (458, 458), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "quotactl": (179, 60), "quotactl_fd": (443, 443), "swapon": (167, 224),
    "swapoff": (168, 225), "acct": (163, 89), "fanotify_init": (300, 262), "fanotify_mark": (301, 263),
    "lookup_dcookie": (212, 18), "nfsservctl": (180, 42), "sysfs": (139, None), "ustat": (136, None),
    "uselib": (134, None),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    # parts of the kernel with a history
    "bpf": (321, 280), "perf_event_open": (298, 241), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "vmsplice": (278, 75), "modify_ldt": (154, None), "memfd_secret": (447, 447),
    "lsm_set_self_attr": (460, 460),
    # the machine
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "create_module": (174, None), "query_module": (178, None),
    "get_kernel_syms": (177, None), "reboot": (169, 142), "clock_settime": (227, 112), "clock_adjtime": (305, 266),
    "settimeofday": (164, 170), "adjtimex": (159, 171), "syslog": (103, 116), "sethostname": (170, 161),
    "setdomainname": (171, 162), "iopl": (172, None), "ioperm": (173, None), "vhangup": (153, 58),
    "_sysctl": (156, None),
    # placement of memory on a machine with several nodes
    "mbind": (237, 235), "set_mempolicy": (238, 237), "get_mempolicy": (239, 236), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "set_mempolicy_home_node": (450, 450),
}  # fmt: skip
_ABSENT = {"clone3": (435, 435)}  # its flags lie in memory, out of a filter's sight; the C library falls back to clone
_UNCOUNTED = {  # memory that is no process's own; gigabytes of it, within the kernel's bounds
    "memfd_create": (319, 279), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
}  # fmt: skip
_CLONE, _IOCTL, _PERSONALITY, _SOCKET, _SOCKETPAIR = (56, 220), (16, 29), (135, 92), (41, 198), (53, 199)
_SETSOCKOPT, _SOL_SOCKET, _SO_SNDBUF = (54, 208), 1, 7


class Architecture(enum.Enum):
    """``AUDIT_ARCH`` value and column of the tables."""

    X86_64 = (0xC000003E, 0)
    ARM64 = (0xC00000B7, 1)

    @property
    def column(self) -> int:
        """Where its numbers stand."""
        return self.value[1]


_MACHINES = {"x86_64": Architecture.X86_64, "aarch64": Architecture.ARM64}
Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def this_architecture() -> Architecture:
    """What this machine's programs are built for. Raises :class:`IsolationError` where there is no filter for it."""
    machine = platform.machine()
    try:
        return _MACHINES[machine]
    except KeyError:
        raise IsolationError(
            f"no system call filter for {machine}; model-written code can be confined on: {', '.join(_MACHINES)}"
        ) from None


def refused(architecture: Architecture) -> dict[str, int]:
    """Calls that are refused whatever their arguments, by name."""
    column = architecture.column
    return {name: number for name, numbers in _REFUSED.items() if (number := numbers[column]) is not None}


def filter_program(architecture: Architecture, *, memory_counted: bool) -> tuple[Instruction, ...]:
    """The filter. ``memory_counted``: a control group bounds all memory; else what escapes counting is refused too."""
    at = architecture.column
    words: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, architecture.value[0]),
        (_RETURN, 0, 0, KILL),
        (_LOAD, 0, 0, _NR),
    ]
    if architecture is Architecture.X86_64:
        words += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, KILL)]
    words += [(_GREATER, 0, 1, LAST_REVIEWED), _error(errno.ENOSYS)]
    for number in refused(architecture).values():
        words += _case(number, [_error(errno.EPERM)])
    for absent in (_ABSENT, {} if memory_counted else _UNCOUNTED):
        for numbers in absent.values():
            words += _case(numbers[at], [_error(errno.ENOSYS)])
    words += _case(_CLONE[at], [_argument(0), (_ANY_BIT, 0, 1, _NEW_NAMESPACES), _error(errno.EPERM), _ALLOWED])
    words += _case(_IOCTL[at], [_argument(1), *_none_of(_TERMINAL_REQUESTS)])
    words += _case(_PERSONALITY[at], [_argument(0), *_one_of(_PERSONALITIES)])
    if not memory_counted:
        words += _case(_SETSOCKOPT[at], _no_larger_sockets())
    for number in (_SOCKET[at], _SOCKETPAIR[at]):
        words += _case(number, _sockets())
    return (*words, _ALLOWED)


def filter_bytes(*, memory_counted: bool) -> bytes:
    """The filter of this machine as an array of ``struct sock_filter``."""
    return b"".join(
        struct.pack("=HBBI", *word) for word in filter_program(this_architecture(), memory_counted=memory_counted)
    )


@cache
def _kept(memory_counted: bool) -> int:
    fd = os.memfd_create("seccomp", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(filter_bytes(memory_counted=memory_counted))
    return fd


def open_filter(*, memory_counted: bool) -> int:
    """A fresh descriptor from which the filter can be read once; whoever asks closes it."""
    return os.open(f"/proc/self/fd/{_kept(memory_counted)}", os.O_RDONLY | os.O_CLOEXEC)


_ALLOWED: Instruction = (_RETURN, 0, 0, ALLOW)


def _error(number: int) -> Instruction:
    return (_RETURN, 0, 0, ERRNO | number)


def _argument(index: int) -> Instruction:
    """Load the lower half, all that the kernel looks at where an argument is an ``int`` (or clone's flags)."""
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * index)


def _case(number: int, then: Sequence[Instruction]) -> list[Instruction]:
    """``then``, which must end in a return, for one call."""
    return [(_EQUAL, 0, len(then), number), *then]


def _one_of(values: Sequence[int]) -> list[Instruction]:
    """Allow when the loaded word is one of ``values``; refuse otherwise."""
    tests = [(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [*tests, _error(errno.EPERM), _ALLOWED]


def _none_of(values: Sequence[int]) -> list[Instruction]:
    tests = [(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [*tests, _ALLOWED, _error(errno.EPERM)]


def _no_larger_sockets() -> list[Instruction]:
    """Pretend that a socket's room to send was changed, which is a wish that the kernel rounds down silently anyway.

    Each Unix socket is reckoned to hold the default, since the kernel does not tell; it would hold up to megabytes.
    """
    level = [_argument(1), (_EQUAL, 1, 0, _SOL_SOCKET), _ALLOWED]
    return [*level, _argument(2), (_EQUAL, 0, 1, _SO_SNDBUF), _error(0), _ALLOWED]


def _sockets() -> list[Instruction]:
    """Unix, IPv4 and IPv6 (streams and datagrams), and the routing netlink that resolvers ask for addresses."""
    protocols = [_argument(2), *_one_of(_PROTOCOLS)]
    kinds = [_argument(1), (_AND, 0, 0, 0xF)]  # without SOCK_NONBLOCK and SOCK_CLOEXEC
    kinds += [(_EQUAL, len(_TYPES) - i, 0, kind) for i, kind in enumerate(_TYPES)]
    kinds += [_error(errno.EPERM)]
    netlink = [_argument(2), *_one_of((0,))]
    other = [_error(errno.EAFNOSUPPORT)]
    return [
        _argument(0),
        (_EQUAL, 0, 1, _UNIX),
        _ALLOWED,
        (_EQUAL, 0, len(netlink), _NETLINK),
        *netlink,
        (_EQUAL, 1 + len(other), 0, _INET),
        (_EQUAL, len(other), 0, _INET6),
        *other,
        *kinds,
        *protocols,
    ]
