"""Weights & Biases."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from rljob_client.run_directory.samples import Sample
from rljob_trainer.trackers.tracker import CLOSE_SECONDS, SAMPLE_COLUMNS, Status, TrackedRun, Tracker, rows

_STEP = "step"


class WandbTracker(Tracker):
    """A run in W&B. Files are in `wandb/` of the output directory, and with WANDB_MODE=offline only there."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self.run_id = run.run_id or secrets.token_hex(4)
        args = {
            "project": run.project,
            "name": run.name,
            "id": self.run_id,
            "resume": "allow",
            "reinit": "create_new",  # the reward function may have a run of its own
            "dir": str(run.directory),
            "config": dict(run.config),
            "allow_val_change": True,
            **run.spec.args,
        }
        # Nothing is printed, read from the terminal or captured, and the process ends in time without a server.
        settings = {
            "silent": True,
            "console": "off",
            "finish_timeout": CLOSE_SECONDS - 5,
            "init_timeout": CLOSE_SECONDS,
        }
        args["settings"] = settings | dict(run.spec.args.get("settings", {}))
        self._run = wandb.init(**args)
        self._table = wandb.Table
        self.run_id = self._run.id
        # W&B's own counter only rises, but an evaluation comes after its step, and steps may be scored ahead.
        self._run.define_metric(_STEP, hidden=True)
        self._run.define_metric("*", step_metric=_STEP)

    def log(self, values: Mapping[str, float], step: int, time: float) -> None:
        self._run.log({_STEP: step, **values})

    def samples(self, samples: Sequence[Sample], step: int) -> None:
        table = self._table(columns=list(SAMPLE_COLUMNS), data=rows(samples))
        self._run.log({_STEP: step, f"samples/{samples[0].kind}": table})

    def note(self, title: str, text: str, step: int) -> None:
        self._run.tags = tuple(dict.fromkeys([*(self._run.tags or ()), title]))
        self._run.notes = f"{self._run.notes or ''}\n{text}".strip()

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=int(status == "Failed"))
