"""Decoding steps until the last response of a rollout has ended: fixed shares of the prompts, or a queue.

    python -m bench.programs.queue_steps

Records `bench/results/queue_steps.json`. A calculation with the queue of the trainer, without a model: in each step,
every sequence that runs gets one token, and every step takes equally long. The lengths of groups are lognormal, and
those of responses within 50 % of their group's. The queue knows nothing of the lengths, or has estimates that are
usually wrong by up to a factor of 1.6 (lognormal, sigma 0.5), or knows the mean of each group. Takes a minute.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from random import Random
from typing import Any

from bench.harness.record import RESULTS, record
from rljob_testing.simulated_decoding import drawn_lengths, least_steps, steps_with_queue, steps_with_shares
from rljob_trainer.roles.work_queue import WorkQueue

GROUP_SIZE = 8
ESTIMATE_SIGMA = 0.5
DRAWS = 30
SIZES = ((1, 32, 32), (2, 64, 32), (4, 64, 32), (4, 256, 32))
"""Engines, groups, and sequences that an engine generates at once."""


def relative_steps(seed: int, engines: int, groups: int, concurrent: int) -> dict[str, float]:
    """Steps of each way, relative to the least that are possible."""
    random = Random(seed)
    means, lengths = drawn_lengths(random, groups, GROUP_SIZE)
    estimates = [mean * random.lognormvariate(0, ESTIMATE_SIGMA) for mean in means]
    least = least_steps(engines, concurrent, lengths)

    def queued(expected: list[float]) -> float:
        return steps_with_queue(WorkQueue(expected, concurrent, GROUP_SIZE), engines, lengths) / least

    return {
        "shares": steps_with_shares(engines, concurrent, lengths) / least,
        "queue": queued([1.0] * groups),
        "queue_with_estimates": queued(estimates),
        "queue_with_means": queued(means),
    }


def main(output: Path) -> None:
    rows: list[dict[str, Any]] = []
    for engines, groups, concurrent in SIZES:
        draws = [relative_steps(seed, engines, groups, concurrent) for seed in range(DRAWS)]
        rows.append(
            {"engines": engines, "groups": groups, "concurrent_sequences": concurrent}
            | {way: round(statistics.mean(draw[way] for draw in draws), 3) for way in draws[0]}
        )
        print(rows[-1], flush=True)
    note = f"calculated: groups of {GROUP_SIZE}, means of {DRAWS} draws, relative to the least steps that are possible"
    print(record("queue_steps", rows, note, output))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    main(parser.parse_args().output)
