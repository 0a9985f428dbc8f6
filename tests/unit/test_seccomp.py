"""The system call filter, run in an interpreter of the kernel's classic BPF."""

import errno
import re
import struct
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxes.isolation import seccomp
from sandboxes.isolation.seccomp import ALLOW, ERRNO, KILL, Architecture, filter_program

X86, ARM = Architecture.X86_64, Architecture.ARM64
ARCHITECTURES = {X86: 0xC000003E, ARM: 0xC00000B7}
WORD = st.integers(0, 2**64 - 1)


def verdict(program, arch, number, *arguments):
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    at, word = 0, 0
    while True:
        code, yes, no, constant = program[at]
        at += 1
        match code:
            case 0x20:
                (word,) = struct.unpack_from("<I", data, constant)
            case 0x54:
                word &= constant
            case 0x06:
                return constant
            case 0x15:
                at += yes if word == constant else no
            case 0x25:
                at += yes if word > constant else no
            case 0x35:
                at += yes if word >= constant else no
            case 0x45:
                at += yes if word & constant else no
            case _:
                raise AssertionError(hex(code))


def asked(architecture, number, *arguments, memory_counted=True):
    return verdict(
        filter_program(architecture, memory_counted=memory_counted), ARCHITECTURES[architecture], number, *arguments
    )


@pytest.mark.parametrize("architecture", [X86, ARM])
def test_calls_on_the_list_are_refused_whatever_their_arguments(architecture):
    calls = seccomp.refused(architecture)
    assert len(calls) > 55
    assert len(set(calls.values())) == len(calls)
    for number in calls.values():
        assert asked(architecture, number, 2**64 - 1, 0, 7) == ERRNO | errno.EPERM


@pytest.mark.parametrize("architecture", [X86, ARM])
def test_ordinary_calls_are_allowed(architecture):
    ordinary = {X86: (0, 1, 2, 9, 57, 59, 202, 231, 257, 334), ARM: (56, 63, 64, 93, 98, 221, 222, 293)}
    for number in ordinary[architecture]:
        assert asked(architecture, number) == ALLOW


@pytest.mark.parametrize(("architecture", "other"), [(X86, ARM), (ARM, X86)])
@given(number=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_another_architectures_calls_end_the_process(architecture, other, number):
    program = filter_program(architecture, memory_counted=True)
    for arch in (ARCHITECTURES[other], 0x40000003, 0):
        assert verdict(program, arch, number) == KILL


@given(number=st.integers(0x40000000, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_the_x32_interface_ends_the_process(number):
    assert asked(X86, number) == KILL


@pytest.mark.parametrize("architecture", [X86, ARM])
@given(number=st.integers(seccomp.LAST_REVIEWED + 1, 0x3FFFFFFF))
@settings(deadline=None, max_examples=30)
def test_calls_newer_than_the_review_do_not_exist(architecture, number):
    assert asked(architecture, number) == ERRNO | errno.ENOSYS


@pytest.mark.parametrize(("architecture", "clone"), [(X86, 56), (ARM, 220)])
@given(flags=WORD)
@settings(deadline=None, max_examples=60)
def test_clone_makes_threads_and_children_but_no_namespace(architecture, clone, flags):
    wanted = ERRNO | errno.EPERM if flags & 0x7E020000 else ALLOW
    assert asked(architecture, clone, flags) == wanted
    assert asked(architecture, clone, 0x003D0F00) == ALLOW  # of pthread_create
    assert asked(architecture, 435) == ERRNO | errno.ENOSYS  # clone3


@pytest.mark.parametrize(("architecture", "ioctl"), [(X86, 16), (ARM, 29)])
@given(above=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_terminals_cannot_be_typed_into_however_the_request_is_dressed(architecture, ioctl, above):
    for request in (0x5412, 0x541C, 0x5423):
        assert asked(architecture, ioctl, 0, above << 32 | request) == ERRNO | errno.EPERM
    for request in (0x5401, 0x5413, 0x541B, 0x80045430):
        assert asked(architecture, ioctl, 0, above << 32 | request) == ALLOW


@pytest.mark.parametrize(("architecture", "socket"), [(X86, 41), (X86, 53), (ARM, 198), (ARM, 199)])
@given(family=WORD, kind=WORD, protocol=WORD)
@settings(deadline=None, max_examples=200)
def test_only_the_usual_sockets_can_be_made(architecture, socket, family, kind, protocol):
    low = [word & 0xFFFFFFFF for word in (family, kind, protocol)]
    usual = (
        low[0] == 1
        or (low[0] == 16 and low[2] == 0)
        or (low[0] in (2, 10) and low[1] & 15 in (1, 2) and low[2] in (0, 1, 6, 17, 58))
    )
    assert (asked(architecture, socket, family, kind, protocol) == ALLOW) == usual


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ((1, 1, 0), True),
        ((1, 5 | 0o2000000, 0), True),
        ((2, 1 | 0o2004000, 6), True),
        ((10, 2, 17), True),
        ((2, 2, 1), True),
        ((16, 3, 0), True),
        ((2, 3, 1), False),  # raw
        ((2, 1, 132), False),  # SCTP
        ((2, 6, 0), False),  # DCCP
        ((16, 3, 9), False),  # audit
        ((17, 3, 0), False),  # packets
        ((38, 5, 0), False),  # the kernel's ciphers
        ((40, 1, 0), False),  # the hypervisor
        ((31, 1, 0), False),  # Bluetooth
    ],
)
def test_sockets_by_example(arguments, allowed):
    assert (asked(X86, 41, *arguments) == ALLOW) is allowed


def test_personalities_are_harmless_ones():
    assert [asked(X86, 135, value) == ALLOW for value in (0, 8, 0xFFFFFFFF, 0x0040000, 0x400000)] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_memory_that_nothing_counts_is_refused_where_no_group_counts():
    for number in (319, 29, 64, 68):
        assert asked(X86, number) == ALLOW
        assert asked(X86, number, memory_counted=False) == ERRNO | errno.ENOSYS


def test_sockets_grow_only_where_a_group_counts_their_memory():
    setsockopt, level, room, other = 54, 1, 7, 8
    assert asked(X86, setsockopt, 3, level, room) == ALLOW
    assert asked(X86, setsockopt, 3, level, room, memory_counted=False) == ERRNO  # "done", and nothing is done
    assert asked(X86, setsockopt, 3, level | 1 << 32, room | 1 << 32, memory_counted=False) == ERRNO
    assert asked(X86, setsockopt, 3, level, other, memory_counted=False) == ALLOW
    assert asked(X86, setsockopt, 3, 6, room, memory_counted=False) == ALLOW


@pytest.mark.parametrize("architecture", [X86, ARM])
@pytest.mark.parametrize("memory_counted", [True, False])
def test_every_jump_lands_inside_and_every_way_ends(architecture, memory_counted):
    program = filter_program(architecture, memory_counted=memory_counted)
    assert len(program) < 4096  # BPF_MAXINSNS
    for at, (code, yes, no, constant) in enumerate(program):
        assert max(yes, no) < 256
        assert 0 <= constant < 2**32
        if code != 0x06:
            assert at + 1 + max(yes, no) < len(program)
    assert program[-1][0] == 0x06


@pytest.mark.parametrize(
    ("architecture", "header"), [(X86, "asm/unistd_64.h"), (ARM, "asm-generic/unistd.h")], ids=["x86_64", "arm64"]
)
def test_numbers_agree_with_the_systems_headers(architecture, header):
    source = f"#define __ARCH_WANT_SYS_CLONE3\n#define __ARCH_WANT_MEMFD_SECRET\n#include <{header}>\n"
    try:
        shown = subprocess.run(
            ["cc", "-E", "-dM", "-"], input=source, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"needs a C compiler and <{header}>")
    known = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)$", shown, re.MULTILINE)}
    ours = seccomp.refused(architecture)
    assert {name: known[name] for name in ours if name in known} == {n: ours[n] for n in ours if n in known}
    assert set(ours) - set(known) <= {"statmount", "listmount", "lsm_set_self_attr"}  # younger than some headers
