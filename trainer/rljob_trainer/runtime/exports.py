"""Exports of the policy as models in Hugging Face format: after the last step, every so many steps, and of the best."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from rljob_api.checkpoint import CheckpointSpec
from rljob_api.evaluation import EvaluationScore
from rljob_client.model_files import model_of_step
from rljob_client.run_directory.durable_files import writing
from rljob_trainer.ledger.output_directory import OutputDirectory
from rljob_trainer.roles.roles import Roles

SCORE_NAME = "evaluation.json"
"""File in the directory of the best model: its `EvaluationScore`."""

_STEP_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True)
class ModelExports:
    """Writes models atomically: a directory with a final name is complete."""

    directory: OutputDirectory
    roles: Roles
    checkpoint: CheckpointSpec

    def due(self, step: int, best: EvaluationScore | None) -> Iterator[tuple[str, Callable[[], None]]]:
        """Name and function of each export of the weights after `step` that is not written yet.

        `best`: the best evaluation so far, whose model is kept; None: none is kept.
        """
        if best is not None and best.step == step and best != self._stored_score():
            yield self.directory.best.name, partial(self.write, self.directory.best, best)
        every, name = self.checkpoint.export_every_steps, model_of_step(step)
        if every is not None and step > 0 and step % every == 0 and not (self.directory.path / name).exists():
            yield name, partial(self._write_step, self.directory.path / name)

    def write(self, target: Path, score: EvaluationScore | None = None) -> None:
        """Write the model to `target`, in place of an earlier one."""
        with writing(target):
            target.parent.mkdir(exist_ok=True)
        for left in target.parent.glob(f"{target.name}.partial*"):
            shutil.rmtree(left, ignore_errors=True)
        # A rank of an attempt that is over may still be writing, on a node that nobody reaches.
        partial_model = target.with_name(f"{target.name}.partial-{secrets.token_hex(4)}")
        self.roles.export_pretrained(partial_model.absolute())
        with writing(target):
            if score is not None:
                (partial_model / SCORE_NAME).write_text(score.model_dump_json(by_alias=True) + "\n", encoding="utf-8")
            former = target.with_name(f"{target.name}.partial-former")
            if target.exists():
                target.rename(former)
            partial_model.rename(target)
            shutil.rmtree(former, ignore_errors=True)

    def _write_step(self, target: Path) -> None:
        self.write(target)
        steps = sorted(int(name[1]) for each in target.parent.iterdir() if (name := _STEP_NAME.fullmatch(each.name)))
        for step in steps[: -self.checkpoint.keep_exports]:
            shutil.rmtree(self.directory.path / model_of_step(step), ignore_errors=True)

    def _stored_score(self) -> EvaluationScore | None:
        with suppress(OSError, ValidationError):
            return EvaluationScore.model_validate_json((self.directory.best / SCORE_NAME).read_bytes())
        return None
