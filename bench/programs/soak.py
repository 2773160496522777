"""Random faults over several jobs on this machine's cluster; fails if a job does not complete or anything leaks.

    make demo-cluster    # the cluster, the images, the operator
    .venv/bin/python -m bench.programs.soak [--minutes 60] [--seed 1] [--jobs 2] [--hostile-tenant] [--output runs/soak]

Processes, pods, kubelets, containerd, the API server and the operator are killed or stopped at times drawn from the
seed, while the jobs have injected failures of their own. The jobs are colocated in one worker pod or in two, or
disaggregated. Exit code 1: a job is not complete or something leaked; the problems are printed. Writes soak.json, and
the last status and ledger of each job.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from bench.harness.record import record
from rljob_testing.soak.cluster import SoakCluster
from rljob_testing.soak.report import problems, row
from rljob_testing.soak.soak import SoakSettings, run_soak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of faults; jobs under way then are waited for")
    parser.add_argument("--seed", type=int, default=1, help="determines the faults, their times and the jobs")
    parser.add_argument("--jobs", type=int, default=2, help="at a time")
    parser.add_argument("--output", type=Path, default=Path("runs/soak"), help="folder for soak.json and the jobs'")
    parser.add_argument("--hostile-tenant", action="store_true", help="store hostile objects in another namespace")
    arguments = parser.parse_args()

    began = time.monotonic()

    def log(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f}  {line}", flush=True)

    folder = arguments.output / "jobs"
    settings = SoakSettings(
        arguments.seed, arguments.minutes, arguments.jobs, folder, hostile_tenant=arguments.hostile_tenant
    )
    soak = run_soak(settings, SoakCluster.of_this_machine(), log)
    print(record("soak", [row(soak)], _NOTE, directory=arguments.output))
    for problem in problems(soak):
        print(problem, file=sys.stderr)
    return int(bool(problems(soak)))


_NOTE = (
    "random faults over jobs of examples/digits.yaml in pods on two kubelets of one machine, which has no GPU: "
    "it does not concern GPU memory"
)

if __name__ == "__main__":
    sys.exit(main())
