"""Overhead of `rljob run` per step of `examples/digits.yaml`, relative to one loop of the same arithmetic.

    python -m bench.programs.overhead [--rounds 3]

Both arms take turns for several rounds, so that noise of the machine affects both alike. Records
`bench/results/overhead.json`: seconds per step by phase of each arm (medians over steps, then over rounds), their
ratio, and the start-up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.harness.record import record
from rljob_testing.repository import EXAMPLES

EXAMPLE = EXAMPLES / "digits.yaml"
WARM_UP_STEPS = 5


def main(rounds: int) -> None:
    arms: dict[str, list[dict[str, Any]]] = {"bare": [], "rljob": []}
    for _ in range(rounds):
        arms["bare"].append(bare_arm())
        arms["rljob"].append(rljob_arm())
    rows = [{"arm": name, **median_of(results)} for name, results in arms.items()]
    ratio = rows[1]["seconds_by_phase"]["step"] / rows[0]["seconds_by_phase"]["step"]
    rows.append({"arm": "ratio", "step": ratio})
    path = record("overhead", rows, f"examples/digits.yaml, 60 steps, {rounds} rounds of both arms in turn")
    print_table(rows, ratio)
    print(path)


def bare_arm() -> dict[str, Any]:
    from rljob_api.manifest import load_manifest
    from rljob_trainer.models.resolve import resolve_model

    model = resolve_model(load_manifest(EXAMPLE).spec.model.uri)
    done = subprocess.run(
        [sys.executable, "-m", "bench.programs.bare_loop", model],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def rljob_arm() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "run"
        rljob = Path(sys.executable).parent / "rljob"
        subprocess.run(
            [rljob, "run", EXAMPLE, "--output", output, "--device", "cpu"], check=True, stdout=subprocess.DEVNULL
        )
        lines = [json.loads(line) for line in (output / "ledger.jsonl").read_text().splitlines()]
        summary = json.loads((output / "summary.json").read_text())
    steps = [line for line in lines if line["kind"] == "step"][WARM_UP_STEPS:]
    phases = ("rollout", "reward", "update", "sync", "checkpoint")
    seconds = {phase: statistics.median(s["seconds"].get(phase, 0.0) for s in steps) for phase in phases}
    seconds["step"] = statistics.median(s["total_seconds"] for s in steps)
    return {
        "start_up_seconds": summary["startup_seconds"],
        "seconds_by_phase": seconds,
        "last_reward": summary["last_reward"],
    }


def median_of(results: list[dict[str, Any]]) -> dict[str, Any]:
    phases = results[0]["seconds_by_phase"]
    return {
        "start_up_seconds": statistics.median(r["start_up_seconds"] for r in results),
        "seconds_by_phase": {p: statistics.median(r["seconds_by_phase"][p] for r in results) for p in phases},
        "last_reward": statistics.median(r["last_reward"] for r in results),
    }


def print_table(rows: list[dict[str, Any]], ratio: float) -> None:
    table = Table("arm", "rollout", "reward", "update", "sync", "checkpoint", "step", "start-up", title="ms a step")
    for row in rows[:2]:
        seconds = row["seconds_by_phase"]
        cells = [f"{1e3 * seconds[p]:.1f}" if p in seconds else "–" for p in ("rollout", "reward", "update", "sync")]
        cells += [f"{1e3 * seconds[p]:.1f}" if p in seconds else "–" for p in ("checkpoint", "step")]
        table.add_row(row["arm"], *cells, f"{row['start_up_seconds']:.1f} s")
    Console().print(table)
    print(f"a step of rljob takes {ratio:.2f} × the bare loop's")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    main(**vars(parser.parse_args()))
