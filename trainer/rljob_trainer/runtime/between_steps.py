"""Work between two steps: evaluations and exports of the weights that the last committed step has left.

It belongs to no step: its time counts for none, and a failure repeats the evaluation or the export alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rljob_trainer.phase_clock import PartClock
from rljob_trainer.runtime.evaluation import Evaluation, best_score
from rljob_trainer.runtime.exports import ModelExports

if TYPE_CHECKING:
    from rljob_trainer.runtime.controller import Controller


class _Stopped(Exception):
    """A stop was requested during an evaluation."""


@dataclass(frozen=True, slots=True)
class BetweenSteps:
    """The evaluations and exports of one attempt."""

    evaluation: Evaluation | None
    exports: ModelExports

    def work(self, run: Controller, last: int) -> bool:
        """Do what is due after the committed step `last`. Returns False if a stop is requested while an evaluation is
        due, which is left to the next attempt."""
        step, best = max(last, 1), None
        if self.evaluation is not None:
            if self.evaluation.is_due(last, run.ledger.records):
                try:
                    self._evaluate(self.evaluation, run, last)
                except _Stopped:
                    return False
            if self.evaluation.spec.keep_best:
                best = best_score(run.ledger.records, self.evaluation.spec.best_metric)
        for name, write in self.exports.due(last, best):
            run.display.phase(f"writing the model of step {last} to {name}")
            # A checkpoint in progress may have a copy in host memory, which rank 0 needs.
            run.phases.do(step, "checkpoint", PartClock(), run.checkpointing.settle, policy_at=None, of_step=False)
            run.phases.do(step, "checkpoint", PartClock(), write, policy_at=last, of_step=False)
            if last < run.spec.algorithm.steps:  # the engines may sleep now
                run.phases.do(step, "sync", PartClock(), lambda: None, policy_at=last, engines_at=last, of_step=False)
        return True

    def _evaluate(self, evaluation: Evaluation, run: Controller, last: int) -> None:
        run.display.phase(f"evaluating after step {last}")
        clock, step, algorithm = PartClock(), max(last, 1), run.spec.algorithm

        def on_group() -> None:
            if run.stop:
                raise _Stopped
            run.listener.phase_began(step, "rollout")  # an evaluation may take longer than a step that hangs

        if run.stop:
            raise _Stopped
        responses = run.phases.do(
            step,
            "rollout",
            clock,
            partial(evaluation.generate, run.roles, last, on_group),
            policy_at=last,
            engines_at=last,
            of_step=False,
            times_usual=max(1.0, evaluation.responses / (algorithm.prompts_per_step * algorithm.group_size)),
        )
        scored = evaluation.score(responses)
        run.listener.evaluation_scored(last, scored.rewards, responses.prompts, responses.completions)
        record = evaluation.record(responses, scored, last, run.attempt, clock.total_seconds, run.ledger.records)
        run.ledger.record(record)
        run.display.evaluation(record)
        run.listener.evaluated(record)
