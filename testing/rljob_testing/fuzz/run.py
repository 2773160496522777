"""Runs a target for a time."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rljob_testing.fuzz.inputs import damaged
from rljob_testing.fuzz.targets import Target


class FuzzFailure(Exception):
    """The target raised. Its error is the cause; the message names the file with the input."""


@dataclass(frozen=True, slots=True)
class Fuzzed:
    """Result of fuzzing one target."""

    inputs: int
    slowest_seconds: float
    """Of one input, in seconds of the processor."""


def fuzz(target: Target, seconds: float, seed: int) -> Fuzzed:
    """Give the target its undamaged seeds, and then damaged ones for `seconds`. Raises FuzzFailure.

    `seed`: of the random numbers; the inputs of the same seed are the same.
    """
    inputs, slowest = 0, 0.0
    for data in _inputs(target, seconds, Random(seed)):
        began = time.process_time()
        try:
            target.check(data)
        except Exception as error:
            raise FuzzFailure(f"{type(error).__name__} for input {inputs} of seed {seed}, in {_kept(data)}") from error
        inputs, slowest = inputs + 1, max(slowest, time.process_time() - began)
    return Fuzzed(inputs, slowest)


def _inputs(target: Target, seconds: float, random: Random) -> Iterator[bytes]:
    yield from target.seeds
    until = time.monotonic() + seconds
    yield damaged(target.seeds, random)
    while time.monotonic() < until:
        yield damaged(target.seeds, random)


def _kept(data: bytes) -> Path:
    with tempfile.NamedTemporaryFile(prefix="rljob-fuzz-", delete=False) as file:
        file.write(data)
    return Path(file.name)
