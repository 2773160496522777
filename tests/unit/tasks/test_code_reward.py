"""Code in responses runs against tests, and cannot reach anything else. The processes and the kernel are real."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from rljob_api.built_in_rewards import CodeArgs
from rljob_client.errors import BadInput
from rljob_trainer.rewards import sandbox
from rljob_trainer.rewards.code import code
from rljob_trainer.rewards.sandbox import run_python

MINUTE = 60.0
GIB = 1 << 30


def run(program: str, **settings: Any) -> str | None:
    return run_python(program, **{"seconds": MINUTE, "memory_bytes": GIB, **settings})


RIGHT = "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\nDone."
STDIN = [{"input": "3\n", "output": "6"}, {"input": "4\n", "output": "8 \n"}]
READS = "```\nprint(2 * int(input()))\n```"


@pytest.mark.parametrize(
    ("completion", "tests", "arguments", "value"),
    [
        (RIGHT, "assert double(2) == 4", {}, 1),
        (RIGHT, ["assert double(2) == 4", "assert double(1) == 3"], {}, 0),
        (RIGHT, ["assert double(2) == 4", "assert double(1) == 3"], {"partial": True}, 0.5),
        ("def double(x): return 2 * x", "assert double(2) == 4", {}, 1),
        (READS, STDIN, {}, 1),
        ("```\nprint(6)\n```", STDIN, {"partial": True}, 0.5),
        ("```\nimport sys; sys.exit(0)\n```", "assert False", {}, 0),
        ("```\nimport os; os._exit(0)\n```", "assert False", {}, 0),
        ("not code", "assert True", {}, 0),
        ("", "assert True", {}, 1),
        (RIGHT, None, {}, None),
        (RIGHT, [], {}, None),
    ],
)
def test_tests_decide(completion: str, tests: Any, arguments: dict[str, Any], value: float | None) -> None:
    args = CodeArgs.model_validate({"timeoutSeconds": 60, **arguments}, by_alias=True, by_name=False)
    assert code(completion.strip(), completion, {"tests": tests}, args) == value


def test_tests_of_another_form_are_refused() -> None:
    with pytest.raises(BadInput, match=r"expected tests in the field 'tests' as Python code or as .*, found int"):
        code("", "", {"tests": [7]}, CodeArgs())


def test_code_that_never_ends_takes_the_time_of_all_tests_only() -> None:
    args = CodeArgs(timeout_seconds=1, partial=True)
    assert code("while True: pass", "while True: pass", {"tests": ["pass"] * 100}, args) == 0


@pytest.mark.parametrize(
    "forbidden",
    [
        "import socket; socket.socket()",
        "import socket; socket.create_connection(('127.0.0.1', PORT))",
        "import os; os.fork()",
        "import subprocess; subprocess.run(['true'], check=True)",
        "import os; os.kill(PARENT, 0)",
        "import os; os.kill(os.getpid(), 0)",
        "open('/etc/passwd')",
        "open('SECRET')",
        "open('SECRET', 'a')",
        "open('/proc/PARENT/environ', 'rb').read()",
        "import os; os.listdir('/')",
        "import os; assert 'RLJOB_SECRET' in os.environ",
        "x = bytearray(2 << 30)",
        "open('large', 'wb').write(bytes(64 << 20))",
        "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    ],
)
def test_nothing_beyond_its_directory_is_allowed(
    forbidden: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("token")
    monkeypatch.setenv("RLJOB_SECRET", "token")
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = forbidden.replace("SECRET'", f"{secret}'").replace("PARENT", str(os.getpid()))
        if "RLJOB" in forbidden:
            program = forbidden
        program = program.replace("PORT", str(server.getsockname()[1]))
        assert run(f"{program}\nprint('reached')") is None
    assert secret.read_text() == "token"


@pytest.mark.parametrize(
    "allowed",
    [
        "open('own', 'w').write('x'); assert open('own').read() == 'x'",
        "import os; os.mkdir('d'); os.rename('d', 'e'); os.rmdir('e')",
        "import threading; t = threading.Thread(target=print); t.start(); t.join()",
        "import json, math, random, re, itertools, collections, decimal, datetime, tempfile; tempfile.mkstemp()",
        "import numpy; assert numpy.ones((64, 64)) @ numpy.ones((64, 64)) is not None",
    ],
)
def test_ordinary_programs_run(allowed: str) -> None:
    assert run(f"{allowed}\nprint('end')", memory_bytes=4 * GIB) is not None


@pytest.mark.parametrize(("known", "missing"), [("platform.machine()", "'riscv64'"), ("version < 1", "True")])
def test_a_kernel_without_a_limit_is_refused(
    known: str, missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A copy of the program takes the machine for another one, or finds no Landlock."""
    copy = tmp_path / "sandbox.py"
    copy.write_text(Path(sandbox.__file__).read_text().replace(known, missing))
    monkeypatch.setattr(sandbox, "__file__", str(copy))
    with pytest.raises(BadInput, match="needs a kernel with seccomp and Landlock"):
        run("print(1)")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_is_whole_instructions_and_ends_in_a_return(machine: str) -> None:
    rules = sandbox.seccomp_filter(machine)
    assert len(rules) % 8 == 0
    assert rules[-8:-6] == b"\x06\x00"
