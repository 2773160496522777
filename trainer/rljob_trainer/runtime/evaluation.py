"""Evaluations between two steps: responses of the engines to prompts that are not trained on, and their score."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from rljob_api.algorithm import AlgorithmSpec
from rljob_api.evaluation import EvaluationScore, EvaluationSpec
from rljob_client.run_directory.records import EvaluationRecord, LedgerRecord, evaluation_records
from rljob_trainer.roles.generation import WorkQueue
from rljob_trainer.roles.roles import Roles
from rljob_trainer.rollout.lots import Sampling, WholeGroups
from rljob_trainer.rollout_batch import Completion
from rljob_trainer.runtime.step_rollouts import GeneratedRollouts, sampling_seed
from rljob_trainer.tasks.scoring import Scorer
from rljob_trainer.tasks.step_rewards import OnRewardError, StepRewards, step_rewards
from rljob_trainer.tasks.task import Task

_SEED_STEP = 0
"""Number of the step in the seeds of evaluations. Rollouts begin with 1. All evaluations have the same seeds, so that
two differ by their weights alone."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The evaluations of a job."""

    spec: EvaluationSpec
    task: Task
    scorer: Scorer
    on_reward_error: OnRewardError
    algorithm: AlgorithmSpec

    def is_due(self, step: int, records: Sequence[LedgerRecord]) -> bool:
        """True if the weights after `step` (0: the initial ones) are to be evaluated, and `records` do not have it."""
        return self.spec.is_due(step, self.algorithm.steps) and all(
            found.step != step for found in evaluation_records(records)
        )

    @property
    def indices(self) -> Sequence[int]:
        """Indices of the evaluated items."""
        return self.task.indices[: self.spec.prompts]

    @property
    def responses(self) -> int:
        """Number of responses of one evaluation."""
        return len(self.indices) * self.spec.samples_per_prompt

    def generate(self, roles: Roles, step: int, on_group: Callable[[], None]) -> GeneratedRollouts:
        """Generate the responses with the weights that the engines have, those after `step`.

        `on_group`: called when all responses to a prompt are complete.
        """
        spec = self.spec
        prompts = [self.task.prompt(index) for index in self.indices]
        scoring = self.scorer.begin(prompts, spec.samples_per_prompt)
        sampling = Sampling(
            spec.temperature, spec.top_p, spec.max_response_tokens or self.algorithm.max_response_tokens
        )

        def work(places: Sequence[int]) -> WholeGroups:
            seeds = [sampling_seed(self.algorithm.seed, _SEED_STEP, place) for place in places]
            token_ids = [prompts[place].token_ids for place in places]
            return WholeGroups(places, token_ids, spec.samples_per_prompt, seeds, sampling)

        def score(place: int, group: Sequence[Completion]) -> None:
            on_group()
            scoring.add(place * spec.samples_per_prompt, group)

        queue = WorkQueue([1.0] * len(prompts), roles.settings.rollout.max_num_seqs, spec.samples_per_prompt)
        groups, memory = roles.generate(step, queue, work, score).finish()
        return GeneratedRollouts(prompts, [completion for group in groups for completion in group], scoring, memory)

    def score(self, responses: GeneratedRollouts) -> StepRewards:
        """The rewards of all responses. Raises `BadInput` if the reward function fails, unless failures count as 0."""
        results = responses.rewards.results(stop_at_failure=self.on_reward_error == "Fail")
        return step_rewards(self.task, responses.prompts, responses.completions, results, self.on_reward_error)

    def record(
        self,
        responses: GeneratedRollouts,
        scored: StepRewards,
        step: int,
        attempt: int,
        seconds: float,
        records: Sequence[LedgerRecord],
    ) -> EvaluationRecord:
        """The ledger record. `records`: those before it."""
        samples, metric = self.spec.samples_per_prompt, self.spec.best_metric
        metrics = evaluation_metrics(scored.rewards, responses.completions, samples, self.spec.success_reward)
        metrics["reward_errors"] = scored.failures
        for name, part in scored.parts.items():
            if given := [value for value in part if not math.isnan(value)]:
                metrics[f"rewards/{name}"] = fmean(given)
        score = EvaluationScore(step=step, metric=metric, score=metrics[metric])
        best = best_score(records, metric)
        return EvaluationRecord(
            attempt=attempt,
            step=step,
            prompts=len(responses.prompts),
            samples_per_prompt=samples,
            metrics=metrics,
            seconds=seconds,
            best=best if best is not None and best.score >= score.score else score,
        )


def best_score(records: Sequence[LedgerRecord], metric: str) -> EvaluationScore | None:
    """The evaluation with the highest `metric`, the first of equal ones; None if there is none."""
    found = [record for record in evaluation_records(records) if metric in record.metrics]
    best = max(found, key=lambda record: record.metrics[metric], default=None)
    return None if best is None else EvaluationScore(step=best.step, metric=metric, score=best.metrics[metric])


def pass_at(k: int, successes: int, samples: int) -> float:
    """Probability that at least one of `k` responses succeeds, estimated without bias from `samples` of them, at least
    `k`: 1 - C(samples - successes, k) / C(samples, k).

    M. Chen et al.: "Evaluating Large Language Models Trained on Code" (2021), equation 1.
    """
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def evaluation_metrics(
    rewards: Sequence[float], completions: Sequence[Completion], samples: int, success_reward: float
) -> dict[str, float]:
    """Metrics by name. `rewards`, `completions`: `samples` for each prompt, prompt after prompt.

    avg@k is the share of successes among all responses; pass@j is given for powers of two up to k, and for k.
    """
    successes = [sum(group >= success_reward) for group in np.asarray(rewards).reshape(-1, samples)]
    lengths = [len(completion.token_ids) for completion in completions]
    attempts = sorted({1 << power for power in range(samples.bit_length())} | {samples})
    return {
        "reward_mean": float(np.mean(rewards)),
        "reward_std": float(np.std(rewards)),
        f"avg@{samples}": float(np.mean(successes)) / samples,
        **{f"pass@{k}": float(np.mean([pass_at(k, int(found), samples) for found in successes])) for k in attempts},
        "response_mean_tokens": float(np.mean(lengths)),
        "response_max_tokens": max(lengths),
        "clipped_ratio": float(np.mean([not completion.finished for completion in completions])),
    }
