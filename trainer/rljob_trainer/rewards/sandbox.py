"""Runs Python code that nobody has read: without network, other processes, and files outside a temporary directory.

The process limits itself before it runs the code: resource limits; Landlock for files; a seccomp filter for the system
calls that open sockets, start processes, or affect others. All of these work for an unprivileged user in a container.
This is not a virtual machine: the code shares the kernel, and can call all other system calls.

This file is also the program of that process, so it imports the standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import platform
import resource
import secrets
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

_NO_LIMITS = 97
"""Exit code if the kernel lacks a limit."""

_FILE_BYTES, _OPEN_FILES = 16 << 20, 64


def run_python(program: str, *, test: str = "", stdin: str = "", seconds: float, memory_bytes: int) -> str | None:
    """The standard output of `program`; None if it fails, or exceeds a limit.

    `test`: code that runs after the program, in the same namespace; `stdin` is not used then. `seconds`: of wall time.
    Raises `BadInput` if the kernel lacks a limit.
    """
    if seconds <= 0:
        return None
    passed = secrets.token_hex(16) if test else ""
    with tempfile.TemporaryDirectory(prefix="rljob-code-") as directory, tempfile.TemporaryFile() as output:
        Path(directory, "program.py").write_text(program, encoding="utf-8", errors="replace")
        if test:
            Path(directory, "test.py").write_text(test, encoding="utf-8", errors="replace")
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", __file__, str(memory_bytes), str(math.ceil(seconds) + 1)],
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            # None of the variables of the trainer, which may hold tokens.
            env={"HOME": directory, "TMPDIR": directory, "PYTHONUTF8": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        try:
            process.communicate((passed or stdin).encode("utf-8", "replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.kill()  # it has no children
            process.wait()
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
    if process.returncode == _NO_LIMITS:
        from rljob_client.errors import BadInput

        raise BadInput(
            "needs a kernel with seccomp and Landlock (Linux 5.13 or later, x86-64 or arm64), found one without; use "
            "other nodes"
        )
    return text if process.returncode == 0 and text.endswith(passed) else None


# --- the process that runs the code ---

_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Architecture in seccomp filters, and the first row of `_REFUSED`."""

_REFUSED = (
    # socket, fork, vfork, execve, execveat, unshare, setns, mount, bpf, add_key, keyctl, io_uring_setup
    (41, 57, 58, 59, 322, 272, 308, 165, 321, 248, 250, 425),
    (198, None, None, 221, 281, 97, 268, 40, 280, 217, 219, 425),
    # kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_open, ptrace, process_vm_readv, process_vm_writev
    (62, 200, 234, 129, 297, 434, 101, 310, 311),
    (129, 130, 131, 138, 240, 434, 117, 270, 271),
)
"""Numbers of refused system calls, for x86-64 and arm64 in turn. Source: the tables of Linux."""

_CLONE, _CLONE3, _CLONE_THREAD = (56, 220), 435, 0x10000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of BPF
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2  # of prctl
_X32 = 0x40000000


def seccomp_filter(machine: str) -> bytes:
    """The BPF program. Threads are allowed, and clone3 does not exist, so that the C library uses clone for them."""
    architecture, column = _MACHINES[machine]
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    if machine == "x86_64":
        lines += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for number in filter(None, (*_REFUSED[column], *_REFUSED[2 + column])):
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    lines += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    lines += [(_EQUAL, 0, 3, _CLONE[column]), (_LOAD, 0, 0, 16), (_ANY_BIT, 1, 0, _CLONE_THREAD)]
    lines += [(_RETURN, 0, 0, _ERRNO | errno.EPERM), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


_EXECUTE, _READ_FILE, _READ_DIRECTORY, _WRITE_FILE = 1 << 0, 1 << 2, 1 << 3, 1 << 1
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of rights on files, by the version of Landlock; 16 from version 5. Source: linux/landlock.h."""


def _limit_files(libc: ctypes.CDLL, writable: str) -> bool:
    """Allow reads of Python's own files, and everything in `writable`. False if the kernel has no Landlock."""
    version = libc.syscall(444, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    every = (1 << _RIGHTS.get(version, 16)) - 1
    ruleset = libc.syscall(444, struct.pack("Q", every), ctypes.c_size_t(8), 0)
    reads = _READ_FILE | _READ_DIRECTORY | _EXECUTE
    own = dict.fromkeys((sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64"), reads)
    devices = {"/dev/null": _READ_FILE | _WRITE_FILE, "/dev/urandom": _READ_FILE, "/etc/ld.so.cache": _READ_FILE}
    for path, rights in {**own, **devices, writable: every}.items():
        if os.path.exists(path):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            libc.syscall(445, ruleset, 1, struct.pack("=Qi", rights, descriptor), 0)
            os.close(descriptor)
    return bool(libc.syscall(446, ruleset, 0) == 0)


def _limit(memory_bytes: int, cpu_seconds: int) -> bool:
    """Limit this process, for good. False if the kernel lacks a limit."""
    libc = ctypes.CDLL(None)
    for kind, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    if platform.machine() not in _MACHINES or libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        return False
    if not _limit_files(libc, os.getcwd()):
        return False
    rules = ctypes.create_string_buffer(seccomp_filter(platform.machine()))
    program = struct.pack("HxxxxxxP", (len(rules) - 1) // 8, ctypes.addressof(rules))
    return bool(libc.prctl(_SET_SECCOMP, _FILTER, program, 0, 0) == 0)


def _main() -> None:
    has_test = os.path.exists("test.py")
    passed = sys.stdin.read() if has_test else ""
    if not _limit(*map(int, sys.argv[1:])):
        os._exit(_NO_LIMITS)
    namespace = {"__name__": "__main__"}
    for name in ("program.py", "test.py")[: 1 + has_test]:
        with open(name, encoding="utf-8") as file:
            exec(compile(file.read(), name, "exec"), namespace)
    print(passed, end="", flush=True)


if __name__ == "__main__":
    _main()
