"""Fuzzes every parser of what others write, and records inputs and failures of each.

python -m bench.programs.fuzz [--seconds 3600]
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
import traceback
from typing import Any

from bench.harness.record import RESULTS, record
from rljob_testing.fuzz.run import FuzzFailure, fuzz
from rljob_testing.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all targets together (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of the random inputs (default: a new one)")
    parser.add_argument("--target", choices=TARGETS, action="append", help="run these, and keep the rows of the others")
    options = parser.parse_args()
    targets = options.target or list(TARGETS)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    rows = {name: measure(name, options.seconds / len(targets), seed) for name in targets}
    kept = {row["target"]: row for row in _recorded_rows()} | rows
    print(
        record(
            "fuzz",
            [kept[name] for name in TARGETS if name in kept],
            "damaged inputs of each parser, one process; a target ends at its first failure",
        )
    )
    return 1 if any(row["failure"] for row in rows.values()) else 0


def _recorded_rows() -> list[dict[str, Any]]:
    path = RESULTS / "fuzz.json"
    return list(json.loads(path.read_text())["rows"]) if path.is_file() else []


def measure(name: str, seconds: float, seed: int) -> dict[str, Any]:
    began = time.monotonic()
    row: dict[str, Any] = {"target": name, "seed": seed, "inputs": None, "slowest_input_seconds": None, "failure": None}
    try:
        done = fuzz(TARGETS[name], seconds, seed)
        row |= {"inputs": done.inputs, "slowest_input_seconds": round(done.slowest_seconds, 3)}
    except FuzzFailure as error:
        traceback.print_exc()
        row["failure"] = str(error)
    row["seconds"] = round(time.monotonic() - began, 1)
    print(row, flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
