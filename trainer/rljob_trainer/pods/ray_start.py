"""`ray start`, without the commands of Ray that are no part of it: to import them takes half of its time.

If a process of Ray dies meanwhile, Ray is started again.
"""

from __future__ import annotations

import os
import sys

from rljob_trainer.roles.ray_driver import STARTS, RayDied

EXIT_DIED = os.EX_TEMPFAIL
"""Exit code if a process of Ray has died in each start."""
_COMMANDS = ("ray.serve.scripts", "ray.dashboard.modules.job.cli", "ray.util.state.state_cli")
"""Ray's command line does without those that cannot be imported."""
_START = "RLJOB_RAY_START"


def main() -> None:
    start = int(os.environ.pop(_START, "1"))
    sys.modules.update(dict.fromkeys(_COMMANDS))  # type: ignore[arg-type]
    from ray.scripts.scripts import main as ray

    try:
        ray()
    except RayDied as error:
        print(f"start {start} of {STARTS} failed: {error}", file=sys.stderr, flush=True)
        if start == STARTS:
            sys.exit(EXIT_DIED)
        # In a new program: the modules of Ray's command line keep what the failed start has set.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, _START: str(start + 1)})


if __name__ == "__main__":
    main()
