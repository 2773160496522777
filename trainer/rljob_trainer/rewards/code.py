"""Runs the code in a response against the tests of its record."""

from __future__ import annotations

import re
import time
from typing import Any

from rljob_api.built_in_rewards import CodeArgs
from rljob_client.errors import BadInput
from rljob_trainer.rewards.sandbox import run_python

_BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


def code(answer: str, completion: str, record: dict[str, Any], args: CodeArgs) -> float | None:
    """1 if all tests pass, or the share of them; None without tests. Raises `BadInput` for tests of another form."""
    tests = record.get(args.tests_field)
    if tests is None or tests == []:
        return None
    tests = tests if isinstance(tests, list) else [tests]
    blocks = _BLOCK.findall(completion)
    program = blocks[-1] if blocks else answer
    deadline = time.monotonic() + args.timeout_seconds
    results = (_passes(program, test, args, deadline - time.monotonic()) for test in tests)
    return sum(results) / len(tests) if args.partial else float(all(results))


def _passes(program: str, test: Any, args: CodeArgs, seconds: float) -> bool:
    if isinstance(test, str):
        return run_python(program, test=test, seconds=seconds, memory_bytes=args.memory) is not None
    if isinstance(test, dict) and {"input", "output"} <= test.keys():
        output = run_python(program, stdin=str(test["input"]), seconds=seconds, memory_bytes=args.memory)
        return output is not None and _lines(output) == _lines(str(test["output"]))
    raise BadInput(
        f"expected tests in the field {args.tests_field!r} as Python code or as {{input, output}}, found "
        f"{type(test).__name__}; correct the data"
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
