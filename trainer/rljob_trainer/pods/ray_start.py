"""`ray start`, without the commands of Ray that are no part of it: to import them takes half of its time."""

from __future__ import annotations

import sys

_COMMANDS = ("ray.serve.scripts", "ray.dashboard.modules.job.cli", "ray.util.state.state_cli")
"""Ray's command line does without those that cannot be imported."""


def main() -> None:
    sys.modules.update(dict.fromkeys(_COMMANDS))  # type: ignore[arg-type]
    from ray.scripts.scripts import main as ray

    ray()


if __name__ == "__main__":
    main()
