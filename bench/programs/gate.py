"""Fails if a phase of the 0.6B arm of `large_models` has become slower than the record of the same kind of machine.

    python -m bench.programs.gate [--record] [--steps N] [--seconds S] [--reuse] [--smoke]

Kind of machine: names of the GPU and of the host's processor, with a record each in `bench/results/gate/`. Without a
record, it passes and says so; `--record` writes one. A phase is slower if its median is more than 5 % above the
recorded one, and above the recorded upper quartile: steps of small models vary. The start is one value, and is compared
only if the caches of compiled code were in the same state. The exit code is 1 if a phase is slower, or not measured.

`--reuse`: judge the last run again. `--smoke`: a tiny model on any device.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.harness.record import RESULTS, record, require_gpus
from bench.programs.large_models import ARMS
from rljob_testing.machine import device, processor
from rljob_testing.plan_accuracy.errors import TIMED_OUT, Row

ARM = "0.6b"
PHASES = ("start", "rollout", "update", "sync")
TOLERANCE = 1.05
WARM_UP_STEPS = 2
NOTE = "0.6B arm of large_models: 128 responses of 512 tokens a step; quartiles of the steps after the first two"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the record of this kind of machine")
    parser.add_argument("--steps", type=int, default=12, help="steps, of which the first two are not counted")
    parser.add_argument("--seconds", type=float, default=math.inf, help="kill the run after this time")
    parser.add_argument("--reuse", action="store_true", help="judge the last run again, instead of another one")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on any device")
    parser.add_argument("--output", type=Path, default=Path("runs/gate"), help="directory of the run (replaced)")
    parser.add_argument("--results", type=Path, default=RESULTS / "gate", help="directory of the records")
    given = parser.parse_args()
    measured = given.output / "gate.json"
    if not given.reuse:
        if not given.smoke:
            require_gpus(1)
        is_warm = has_compiled_code()
        row = ARMS.row(ARM, given.steps, given.smoke, given.output / ARM, given.seconds)
        measured.write_text(json.dumps(row_of(row, is_warm)))
    found: Row = json.loads(measured.read_text())
    kind = device() if device().startswith(processor()) else f"{device()}, {processor()}"
    name = re.sub("[^a-z0-9]+", "-", f"{'smoke ' if given.smoke else ''}{kind}".lower()).strip("-")
    path = given.results / f"{name}.json"
    earlier = json.loads(path.read_text())["rows"][0] if path.exists() else None
    slower = judged(found, earlier)
    print({name: value for name, value in found.items() if name != "seconds"})
    if found["exit_code"] not in (0, TIMED_OUT) or not all(phase in found["seconds"] for phase in PHASES):
        print(f"the run ended with {found['exit_code']} before it was measured: see {given.output}")
        return 1
    if given.record:
        print(f"recorded in {record(path.stem, [found], NOTE, given.results, kind=kind)}")
    elif earlier is None:
        print(f"there is no record of {kind} ({path}): nothing is compared; --record writes it")
    else:
        print(f"slower than {path}: {', '.join(slower)}" if slower else f"no phase is slower than in {path}")
        return int(bool(slower))
    return 0


def judged(found: Row, earlier: Row | None) -> list[str]:
    """Print each phase, and return the names of those that are slower, or have no value."""
    slower = []
    for phase in PHASES:
        now = found["seconds"].get(phase)
        before = earlier["seconds"].get(phase) if earlier else None
        text = f"{phase:<8} {described(now)}"
        if earlier and before and phase == "start" and found["warm_start"] != earlier["warm_start"]:
            text += f"   recorded {described(before)}, with other caches: not compared"
        elif before:
            limit = max(before[1] * TOLERANCE, before[2])
            is_slower = now is None or not now[1] <= limit
            text += f"   recorded {described(before)}, limit {limit:.3f}{'   SLOWER' if is_slower else ''}"
            slower += [phase] if is_slower else []
        print(text)
    return slower


def described(quartiles: Sequence[float] | None) -> str:
    return "not measured" if quartiles is None else f"{quartiles[1]:.3f} s ({quartiles[0]:.3f} to {quartiles[2]:.3f})"


def row_of(row: Row, is_warm: bool) -> Row:
    """The part of a row of `Arms.row` that is compared and recorded."""
    shares = ("idle_share_of_gpus", "update_model_flops_share", "decode_bandwidth_share")
    kept = ("exit_code", "processor", "cores", *shares)
    seconds = dict(row.get("quartiles", {}))
    if start := row.get("start_up_seconds"):
        seconds["start"] = [start] * 3
    found = {name: row[name] for name in kept if name in row}
    return found | {"warm_start": is_warm, "counted_steps": len(row["all_seconds"][WARM_UP_STEPS:]), "seconds": seconds}


def has_compiled_code() -> bool:
    """True if vLLM has compiled code in its cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return any(Path(os.environ.get("VLLM_CACHE_ROOT") or Path(cache) / "vllm").glob("torch_compile_cache/*"))


if __name__ == "__main__":
    sys.exit(main())
