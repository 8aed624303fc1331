"""The seccomp filter of the sandbox: system calls that would lead around its limits fail.

Namespaces and mounts (a new file system has no size limit), System V memory and files in memory (in no process's
memory while they are not mapped), sockets other than Unix and IP (AF_VSOCK reaches the host of a virtual machine from
any network namespace), and parts of the kernel that programs do not need. Classic BPF: linux/filter.h, linux/seccomp.h.
"""

import errno
import platform
import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCHITECTURE_AT, FIRST_ARGUMENT_AT = 0, 4, 16  # offsets in struct seccomp_data
ALLOW, FAIL = 0x7FFF0000, 0x00050000
NAMESPACES: Final = 0x7E020000  # all CLONE_NEW* flags of clone
X32: Final = 0x40000000  # the other numbers of x86-64
FAMILIES: Final = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
# io_uring_setup; the new mount calls; memfd_secret. The same numbers everywhere
SINCE_5_1: Final = (425, *range(428, 434), 442, 447)


class Numbers(NamedTuple):
    """System calls of one architecture."""

    architecture: int  # AUDIT_ARCH_*
    denied: Sequence[int]
    clone: int
    socket: int


NUMBERS: Mapping[str, Numbers] = {
    "x86_64": Numbers(
        0xC000003E,
        (
            *(272, 308, 165, 166, 155),  # unshare, setns, mount, umount2, pivot_root
            *(29, 30, 31, 64, 68, 319),  # shmget, shmat, shmctl, semget, msgget, memfd_create
            *(248, 249, 250, 321, 298, 323),  # add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd
            *(101, 310, 311, 304),  # ptrace, process_vm_readv, process_vm_writev, open_by_handle_at
        ),
        clone=56,
        socket=41,
    ),
    "aarch64": Numbers(
        0xC00000B7,
        (97, 268, 40, 39, 41, 194, 196, 195, 190, 186, 279, 217, 218, 219, 280, 241, 282, 117, 270, 271, 265),
        clone=220,
        socket=198,
    ),
}
CLONE3: Final = 435  # its flags are in memory, where a filter cannot read them; C libraries go on with clone

Step = tuple[int, int, int, int]  # instruction, jump if true, jump if false, operand


def program(machine: str = platform.machine()) -> bytes | None:
    """The filter for bubblewrap's --seccomp; None on an architecture that is not known here."""
    if machine not in NUMBERS:
        return None
    numbers = NUMBERS[machine]
    steps: list[Step] = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        *fails_unless((EQUAL, numbers.architecture), errno.EPERM),
        (LOAD, 0, 0, NUMBER_AT),
        *fails_if((AT_LEAST, X32), errno.EPERM),
        *fails_if((EQUAL, CLONE3), errno.ENOSYS),
    ]
    for number in (*numbers.denied, *SINCE_5_1):
        steps += fails_if((EQUAL, number), errno.EPERM)
    flags = [(LOAD, 0, 0, FIRST_ARGUMENT_AT), *fails_if((ANY_BIT, NAMESPACES), errno.EPERM), allow()]
    steps += [(EQUAL, 0, len(flags), numbers.clone), *flags]
    families: list[Step] = [(LOAD, 0, 0, FIRST_ARGUMENT_AT)]
    for family in FAMILIES:
        families += [(EQUAL, 0, 1, family), allow()]
    families.append(fail(errno.EAFNOSUPPORT))
    steps += [(EQUAL, 0, len(families), numbers.socket), *families, allow()]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def fails_if(test: tuple[int, int], error: int) -> list[Step]:
    return [(test[0], 0, 1, test[1]), fail(error)]


def fails_unless(test: tuple[int, int], error: int) -> list[Step]:
    return [(test[0], 1, 0, test[1]), fail(error)]


def fail(error: int) -> Step:
    return (RETURN, 0, 0, FAIL | error)


def allow() -> Step:
    return (RETURN, 0, 0, ALLOW)
