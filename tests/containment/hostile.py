"""Hostile programs, for any sandbox: each prints ``BREACH …`` for what it reached, and ``held`` when it has tried all.

A program is Python source that needs the standard library only; ``program(attack, bait)`` is what to run. Load this
file by its path and run the list through ``Sandbox.exec`` of whatever is to be tested, under a profile of ``MEMORY``,
``DISK``, ``PIDS``, ``SECONDS`` and ``OUTPUT``; ``verdict`` judges what came of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

MEMORY, DISK, PIDS, SECONDS, OUTPUT = 128 * 2**20, 8 * 2**20, 32, 2.0, 16_384  # of the profile to run them under


@dataclasses.dataclass(frozen=True)
class Attack:
    """``killed``: it does not stop by itself; being ended at a limit is how it must end. ``None``: either will do."""

    name: str
    source: str
    killed: bool | None = False
    seconds: float = 1.5


@dataclasses.dataclass(frozen=True)
class Bait:
    """What stands about on the host for programs to find."""

    pid: int
    port: int
    secret: str
    unix: str
    abstract: str
    variable: str
    image: bool  # commands see the files of an image, which has an /etc/shadow and the like of its own


@contextlib.contextmanager
def bait(*, image: bool = False) -> Iterator[Bait]:
    """Servers, a file, a variable and a process that a sandboxed program must not reach."""
    variable = "ENVFARM_BAIT"
    with (
        tempfile.TemporaryDirectory(prefix="bait-") as folder,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as hidden,
    ):
        secret = Path(folder, "bait-secret.txt")
        secret.write_text("for no one")
        unix.bind(str(Path(folder, "socket")))
        unix.listen()
        abstract = f"bait-{os.getpid()}"
        hidden.bind("\0" + abstract)
        hidden.listen()
        os.environ[variable] = "for no one"
        try:
            yield Bait(
                pid=os.getpid(),
                port=tcp.getsockname()[1],
                secret=str(secret),
                unix=str(Path(folder, "socket")),
                abstract=abstract,
                variable=variable,
                image=image,
            )
        finally:
            del os.environ[variable]


def program(attack: Attack, baits: Bait) -> str:
    """Source to run."""
    known = dataclasses.asdict(baits) | {"memory": MEMORY, "disk": DISK, "pids": PIDS}
    end = "" if attack.killed else "\nprint('held', flush=True)\n"
    return f"BAIT = {known!r}\n{_PRELUDE}\n{attack.source.strip()}\n{end}"


def verdict(attack: Attack, *, output: str, exit_code: int | None, timed_out: bool) -> str:
    """Empty when the sandbox held; otherwise what went wrong."""
    breaches = [line for line in output.splitlines() if line.startswith("BREACH")]
    if breaches:
        return "; ".join(breaches)
    if timed_out or exit_code not in (0, None):
        ended = attack.killed is not False
    else:
        ended = not attack.killed and "held" in output.split()
    return "" if ended else f"exit status {exit_code}: {output[-500:]}"


_PRELUDE = r"""
import ctypes, errno, mmap, os, platform, resource, signal, socket, stat, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
_X86 = platform.machine() == "x86_64"
NUMBERS = dict(
    clone=(56, 220), unshare=(272, 97), setns=(308, 268), mount=(165, 40), fsopen=(430, 430), open_tree=(428, 428),
    pivot_root=(155, 41), chroot=(161, 51), ptrace=(101, 117), process_vm_readv=(310, 270), bpf=(321, 280),
    io_uring_setup=(425, 425), userfaultfd=(323, 282), perf_event_open=(298, 241), keyctl=(250, 219),
    add_key=(248, 217), clock_settime=(227, 112), settimeofday=(164, 170), adjtimex=(159, 171), reboot=(169, 142),
    swapon=(167, 224), kexec_load=(246, 104), init_module=(175, 105), syslog=(103, 116), acct=(163, 89),
    open_by_handle_at=(304, 265), name_to_handle_at=(303, 264), clone3=(435, 435), pidfd_open=(434, 434),
    pidfd_getfd=(438, 438), sethostname=(170, 161), quotactl=(179, 60), fanotify_init=(300, 262),
    personality=(135, 92),
)

def breach(what):
    print("BREACH", what, flush=True)

def call(name, *arguments):
    # result of a system call, negative errno when it fails
    number = NUMBERS[name][0 if _X86 else 1]
    got = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    return got if got >= 0 else -ctypes.get_errno()

def denied(name, *arguments):
    got = call(name, *arguments)
    if got not in (-errno.EPERM, -errno.ENOSYS):
        breach(f"{name}{arguments} answers {got}")

def fails(what, attempt):
    try:
        attempt()
    except (OSError, ValueError):
        return
    breach(what)
"""

_FILL = r"""
import errno
total = 0
for folder in ("/workspace", "/tmp", "/dev/shm"):
    mine = 0
    try:
        for i in range(64):
            with open(f"{folder}/fill{i}", "wb", buffering=0) as file:
                while True:
                    mine += file.write(b"x" * 2**18)
                    if mine > 4 * BAIT["disk"]:
                        raise OSError(errno.ENOSPC, "enough")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            print(folder, error)
    if mine > 2 * BAIT["disk"]:
        breach(f"{mine} bytes in {folder}")
"""

ATTACKS = (
    Attack("fork bomb", "while True:\n try: os.fork()\n except OSError: pass", killed=True, seconds=1.0),
    Attack(
        "more processes than allowed",
        r"""
made = 0
try:
    for _ in range(4 * BAIT["pids"]):
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        made += 1
except OSError:
    pass
if made > BAIT["pids"]:
    breach(f"{made} processes")
""",
    ),
    Attack(
        "more threads than allowed",
        r"""
made = 0
try:
    for _ in range(4 * BAIT["pids"]):
        threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
        made += 1
except RuntimeError:
    pass
if made > BAIT["pids"]:
    breach(f"{made} threads")
sys.stdout.flush()
print("held", flush=True)
os._exit(0)
""",
    ),
    Attack("ten times the memory at once", "x = bytearray(10 * BAIT['memory'])\nbreach('had it')", killed=True),
    Attack(
        "ten times the memory, shared",
        r"""
keep, step = [], 4 * 2**20
for _ in range(10 * BAIT["memory"] // step):
    m = mmap.mmap(-1, step)
    m.write(b"x" * step)
    keep.append(m)
breach("had it")
""",
        killed=True,
    ),
    Attack(
        "ten times the memory, by many",
        r"""
for _ in range(20):
    if os.fork() == 0:
        keep = [bytearray(b"x") * (BAIT["memory"] // 2)]
        time.sleep(1)
        os._exit(0)
statuses = [os.wait()[1] for _ in range(20)]
if not any(statuses):
    breach("had it")
sys.exit(1)
""",
        killed=True,
    ),
    Attack(
        "ten times the memory, in files without a name",
        r"""
total = 0
try:
    for i in range(200):
        fd = os.memfd_create("x")
        for _ in range(16):
            total += os.write(fd, b"x" * 2**19)
except OSError:
    pass
if total > 2 * BAIT["memory"]:
    breach(f"{total} bytes")
sys.exit(1)
""",
        killed=True,
    ),
    Attack("full disk", _FILL, killed=None),
    Attack(
        "one huge file",
        "fails('a huge file', lambda: os.write(os.open('/workspace/huge', os.O_CREAT | os.O_RDWR), b'x') and "
        "os.pwrite(os.open('/workspace/huge', os.O_RDWR), b'x', 2**40))",
    ),
    Attack(
        "no inodes left",
        r"""
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
made, end = 0, time.monotonic() + 1.2
try:
    while time.monotonic() < end:
        os.close(os.open(f"/workspace/inode{made}", os.O_CREAT))
        made += 1
except OSError as error:
    print(error)
if made > 50_000:
    breach(f"{made} files")
""",
        killed=None,
        seconds=1.9,
    ),
    Attack(
        "folders too deep to name",
        r"""
try:
    for _ in range(1500):
        os.mkdir("deep")
        os.chdir("deep")
except OSError as error:
    print(error)
os.mkdir("locked") if not os.path.exists("locked") else None
os.chmod("locked", 0)
os.chmod(".", 0o500)
""",
        killed=None,
    ),
    Attack(
        "the memory of page tables",
        r"""
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
size, read, private_unreserved, no_huge = 2**36, 1, 0x4022, 15
tables, ends = 0, time.monotonic() + 1.0
while time.monotonic() < ends:
    at = libc.mmap(None, size, read, private_unreserved, -1, 0)
    if at in (None, 2**64 - 1):
        break
    libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(size), no_huge)
    for start in range(at, at + size, 2**21):
        ctypes.c_char.from_address(start).value
        tables += 1
    if 4096 * tables > 4 * BAIT["memory"]:
        breach(f"{4096 * tables} bytes of page tables")
        break
""",
        killed=None,
    ),
    Attack(
        "semaphores and messages",
        r"""
sets, sent, ends = 0, 0, time.monotonic() + 0.7
message = ctypes.create_string_buffer(bytes([1] * 8) + bytes(8192))
while time.monotonic() < ends and libc.semget(0, 32000, 0o1600) >= 0:
    sets += 1
while time.monotonic() < ends + 0.5 and (queue := libc.msgget(0, 0o1600)) >= 0:
    while libc.msgsnd(queue, message, ctypes.c_size_t(8192), 0o4000) == 0:
        sent += 8192
if sets * 32000 * 64 > 4 * BAIT["memory"] or sent > 2 * BAIT["memory"]:
    breach(f"{sets} sets of semaphores, {sent} bytes of messages")
""",
        killed=None,
    ),
    Attack(
        "empty files without end",
        r"""
made, ends = 0, time.monotonic() + 1.0
try:
    while time.monotonic() < ends:
        os.mknod(f"/dev/shm/{made:x}")
        made += 1
except OSError:
    pass
if made > BAIT["disk"] // 2048:
    breach(f"{made} files")
""",
        killed=None,
    ),
    Attack(
        "the memory of sockets",
        r"""
sent, ends, keep = 0, time.monotonic() + 1.0, []
for _ in range(6):
    reader, writer = os.pipe()
    if os.fork() == 0:
        mine = 0
        try:
            while time.monotonic() < ends:
                pair = socket.socketpair()
                keep.append(pair)
                for one in pair:
                    one.setblocking(False)
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**22)
                    try:
                        while True:
                            mine += one.send(b"x" * 65536)
                            os.write(writer, b"x" * 16)
                    except BlockingIOError:
                        pass
        except OSError:
            pass
        time.sleep(5)
        os._exit(0)
    os.set_blocking(reader, False)
    keep.append(reader)
time.sleep(1.1)
for reader in keep:
    try:
        sent += len(os.read(reader, 65536)) // 16 * 65536
    except BlockingIOError:
        pass
if sent > 4 * BAIT["memory"]:
    breach(f"{sent} bytes wait in sockets")
""",
        killed=None,
    ),
    Attack("a gibibyte on stdout", "for _ in range(1024): os.write(1, b'x\\n' * 2**19)", killed=True),
    Attack("a gibibyte on stderr", "for _ in range(1024): os.write(2, b'x\\n' * 2**19)", killed=True),
    Attack("output without a newline", "while True: os.write(1, b'x' * 65536)", killed=True),
    Attack("output byte by byte", "while True: os.write(1, b'x')", killed=True, seconds=0.7),
    Attack(
        "deaf to signals",
        "for s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: time.sleep(1)",
        killed=True,
        seconds=0.5,
    ),
    Attack(
        "double fork into another session",
        r"""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for s in (1, 2, 15):
            signal.signal(s, signal.SIG_IGN)
        while True:
            time.sleep(1)
    os._exit(0)
os.wait()
""",
    ),
    Attack(
        "stopped children",
        r"""
for _ in range(5):
    child = os.fork()
    if child == 0:
        os.setsid()
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
""",
    ),
    Attack(
        "files of the host",
        r"""
for path in (BAIT["secret"], "/etc/shadow", "/etc/passwd", "/root", "/home", "/var", "/sys/kernel", "/proc/kcore",
             "/proc/kmsg", "/proc/1/root/etc/shadow", "/proc/1/root" + BAIT["secret"], "/run", "/boot", "/mnt"):
    try:
        got = os.listdir(path) if os.path.isdir(path) else open(path).read(100)
    except OSError:
        continue
    if got and not sys.base_prefix.startswith(path) and (path.endswith("bait-secret.txt") or not BAIT["image"]):
        breach(f"read {path}: {got!r:.80}")
""",
    ),
    Attack(
        "writing where nothing is one's own",
        r"""
kernel = ["/proc/sys/kernel/" + name for name in ("hostname", "core_pattern", "modprobe", "sysrq", "panic")]
for path in ("/usr/x", "/bin/x", "/etc/x", "/dev/x", "/proc/sysrq-trigger", *kernel):
    fails(f"wrote {path}", lambda: open(path, "r+" if path in kernel else "w").write("1"))
for path in ("/dev/null", "/usr/bin/env", "/proc/sys/kernel/hostname"):
    fails(f"changed {path}", lambda: os.chmod(path, 0o777))
fails("lowered its own price", lambda: open("/proc/self/oom_score_adj", "w").write("-1000"))
""",
    ),
    Attack(
        "raising its own bounds",
        r"""
for name in ("RLIMIT_CORE", "RLIMIT_NOFILE", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_DATA"):
    number = getattr(resource, name)
    if resource.getrlimit(number)[1] == resource.RLIM_INFINITY:
        breach(f"{name} has no bound")
    fails(f"raised {name}", lambda: resource.setrlimit(number, (resource.RLIM_INFINITY,) * 2))
if os.path.isdir("/sys/fs/cgroup") and os.listdir("/sys/fs/cgroup"):
    breach("sees control groups")
""",
    ),
    Attack(
        "processes of the host",
        r"""
if max(int(p) for p in os.listdir("/proc") if p.isdigit()) > 50:
    breach("sees processes of others")
for pid in (BAIT["pid"], os.getppid(), 1, -1):
    if pid > 50:
        fails(f"signalled {pid}", lambda: os.kill(pid, 0))
    else:
        try:
            os.kill(pid, signal.SIGTERM)  # its own namespace at most
        except OSError:
            pass
""",
    ),
    Attack(
        "variables of the host",
        r"""
for name in ("self", "1"):
    try:
        if BAIT["variable"].encode() in open(f"/proc/{name}/environ", "rb").read():
            breach(f"environment of {name}")
    except OSError:
        pass
""",
    ),
    Attack(
        "tracing another process",
        r"""
child = os.fork()
if child == 0:
    time.sleep(1)
    os._exit(0)
denied("ptrace", 16, child, 0, 0)
denied("ptrace", 0x4206, child, 0, 0)
denied("process_vm_readv", child, 0, 0, 0, 0, 0)
pidfd = call("pidfd_open", child, 0)
if pidfd >= 0:
    denied("pidfd_getfd", pidfd, 0, 0)
fails("read another's memory", lambda: open("/proc/1/mem", "rb").read(1))
os.kill(child, 9)
""",
    ),
    Attack(
        "sockets below the usual",
        r"""
for family, kind, protocol in ((2, 3, 1), (10, 3, 58), (17, 3, 0x300), (16, 3, 9), (16, 3, 4), (38, 5, 0), (40, 1, 0),
                               (31, 3, 0), (2, 1, 132), (2, 6, 33), (29, 3, 1), (44, 3, 0), (15, 3, 2)):
    fails(f"socket {family} {kind} {protocol}", lambda: socket.socket(family, kind, protocol))
""",
    ),
    Attack(
        "the network, and the metadata address",
        r"""
for address in (("127.0.0.1", BAIT["port"]), ("1.1.1.1", 53), ("169.254.169.254", 80), ("10.0.0.1", 80)):
    fails(f"reached {address}", lambda: socket.create_connection(address, 0.3))
fails("sent a datagram", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("1.1.1.1", 53)))
fails("reached over IPv6", lambda: socket.create_connection(("fd00:ec2::254", 80), 0.3))
fails("resolved a name", lambda: socket.getaddrinfo("example.org", 80))
""",
    ),
    Attack(
        "sockets of the host",
        r"""
for name in (BAIT["unix"], "\0" + BAIT["abstract"], "/var/run/docker.sock", "/run/docker.sock", "/run/systemd/private"):
    fails(f"reached {name!r}", lambda: socket.socket(socket.AF_UNIX).connect(name))
""",
    ),
    Attack(
        "typing into a terminal",
        r"""
import fcntl
fails("has a terminal", lambda: os.open("/dev/tty", os.O_RDWR))
outer, inner = os.openpty()
for fd in (0, 1, 2, inner):
    for request in (0x5412, 0x541C, 0x5412 | 1 << 32, 0x5423):
        letter = ctypes.create_string_buffer(b"\n")
        got = libc.ioctl(fd, ctypes.c_ulong(request), letter)
        if got >= 0:
            breach(f"typed into {fd} by {request:#x}")
libc.ioctl(inner, ctypes.c_ulong(0x5412), ctypes.create_string_buffer(b"x"))
if ctypes.get_errno() != errno.EPERM:
    breach("TIOCSTI is not refused")
""",
    ),
    Attack(
        "inherited descriptors",
        r"""
for name in os.listdir("/proc/self/fd"):
    if int(name) > 2:
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the one that listed
        breach(f"inherited {name}: {target}")
""",
    ),
    Attack(
        "devices",
        r"""
known = {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm", "fd", "stdin", "stdout", "stderr",
         "console", "core", "mqueue"}
for name in set(os.listdir("/dev")) - known:
    breach(f"/dev/{name}")
for path in ("/dev/mem", "/dev/kmsg", "/dev/sda", "/dev/vda", "/dev/fuse", "/dev/kvm", "/dev/net/tun"):
    fails(f"opened {path}", lambda: os.open(path, os.O_RDONLY))
for kind, number in ((stat.S_IFBLK, os.makedev(8, 0)), (stat.S_IFCHR, os.makedev(1, 1))):
    fails("made a device", lambda: os.mknod("/workspace/device", 0o600 | kind, number))
""",
    ),
    Attack(
        "clocks",
        r"""
time_spec = struct.pack("qq", 10**9, 0)
denied("clock_settime", 0, time_spec)
denied("settimeofday", time_spec, 0)
denied("adjtimex", ctypes.create_string_buffer(256))
""",
    ),
    Attack(
        "mounts",
        r"""
denied("mount", b"x", b"/tmp", b"tmpfs", 0, 0)
denied("mount", b"none", b"/", 0, 16384 | 1 << 18, 0)
denied("fsopen", b"tmpfs", 0)
denied("open_tree", -100, b"/", 1)
denied("pivot_root", b"/tmp", b"/tmp")
denied("chroot", b"/tmp")
""",
    ),
    Attack(
        "namespaces in namespaces",
        r"""
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x4000000, 0x8000000, 0x2000000, 0x10020000, 0x80):
    denied("unshare", flag)
for flag in (0x10000000, 0x10020000, 0x40000000):
    got = call("clone", flag | signal.SIGCHLD, 0, 0, 0, 0)
    if got == 0:
        os._exit(0)
    if got != -errno.EPERM:
        breach(f"clone into {flag:#x} answers {got}")
if call("clone3", struct.pack("8Q", 0x10000000, 0, 0, 0, signal.SIGCHLD, 0, 0, 0), 64) != -errno.ENOSYS:
    breach("clone3 is there")
denied("setns", 0, 0)
""",
    ),
    Attack(
        "parts of the kernel with a history",
        r"""
denied("io_uring_setup", 8, ctypes.create_string_buffer(120))
denied("bpf", 0, ctypes.create_string_buffer(72), 72)
denied("userfaultfd", 1)
denied("perf_event_open", ctypes.create_string_buffer(120), 0, -1, -1, 0)
denied("keyctl", 0, -3, 0)
denied("add_key", b"user", b"x", b"x", 1, -3)
denied("kexec_load", 0, 0, 0, 0)
denied("init_module", 0, 0, b"")
denied("name_to_handle_at", -100, b"/", 0, 0, 0)
denied("open_by_handle_at", 0, ctypes.create_string_buffer(64), 0)
denied("swapon", b"/workspace/x", 0)
denied("reboot", 0, 0, 0)
denied("syslog", 3, 0, 0)
denied("acct", b"/workspace/x")
denied("quotactl", 0, 0, 0, 0)
denied("fanotify_init", 0, 0)
denied("sethostname", b"x", 1)
denied("personality", 0x0040000)
""",
    ),
    Attack(
        "system calls of another architecture",
        r"""
if _X86:
    # mov eax, 20; int 0x80; ret (getpid of i386) and mov eax, 0x40000027; syscall; ret (getpid of x32)
    for code in (b"\xb8\x14\0\0\0\xcd\x80\xc3", b"\xb8\x27\0\0\x40\x0f\x05\xc3"):
        child = os.fork()
        if child == 0:
            page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
            page.write(code)
            address = ctypes.addressof(ctypes.c_char.from_buffer(page))
            os._exit(0 if ctypes.CFUNCTYPE(ctypes.c_int)(address)() > 0 else 1)
        status = os.waitpid(child, 0)[1]
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            breach(f"{code!r}")
""",
    ),
    Attack(
        "privileges",
        r"""
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
for name, wanted in (("CapEff", "0" * 16), ("CapPrm", "0" * 16), ("CapBnd", "0" * 16), ("CapAmb", "0" * 16),
                     ("NoNewPrivs", "1"), ("Seccomp", "2")):
    if status[name].strip() != wanted:
        breach(f"{name} is {status[name].strip()}")
for user in (0, 1, 1000):
    if user != os.getuid():
        fails(f"became {user}", lambda: os.setuid(user))
        fails(f"joined {user}", lambda: os.setgroups([user]))
fails("took a file", lambda: os.chown("/usr/bin/env", os.getuid(), -1))
""",
    ),
    Attack(
        "core dumps",
        r"""
child = os.fork()
if child == 0:
    os.abort()
if os.WCOREDUMP(os.waitpid(child, 0)[1]):
    breach("a core was dumped")
if [name for name in os.listdir(".") if "core" in name]:
    breach("a core file")
""",
    ),
    Attack(
        "all processors at once",
        "for _ in range(8):\n if os.fork() == 0: break\nwhile True: pass",
        killed=True,
        seconds=1.2,
    ),
    Attack(
        "files of neighbours",
        r"""
found, end = [], time.monotonic() + 0.5
for root in ("/tmp", "/workspace", "/workspace/..", "/proc/1/root/tmp"):
    for folder, folders, files in os.walk(root):
        here = os.path.realpath(folder)
        if here == "/":
            folders[:] = [f for f in folders if f not in ("proc", "sys", "usr", "lib", "lib64", "bin", "sbin", "dev")]
        found += [f for f in files if f == "neighbour-secret.txt"]
        if time.monotonic() > end:
            break
if found:
    breach("a neighbour's file")
""",
    ),
    Attack(
        "a lock on what neighbours need",
        r"""
import fcntl
for path in ("/usr/bin/env", "/usr"):
    try:
        fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pass
    fails(f"a lease on {path}", lambda: fcntl.fcntl(os.open(path, os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_WRLCK))
""",
    ),
    Attack(
        "shared memory and queues of the host",
        r"""
shmget = libc.shmget(0x5EED, 4096, 0o600)
for path, header in (("/proc/sysvipc/shm", 1), ("/proc/sysvipc/msg", 1), ("/proc/sysvipc/sem", 1)):
    try:
        if len(open(path).read().splitlines()) > header + (shmget >= 0 and path.endswith("shm")):
            breach(path)
    except OSError:
        pass
""",
    ),
)
