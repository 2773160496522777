"""The rollouts of one step: prompts, completions and rewards.

A `RolloutBatch` is a struct of arrays, so that it passes through Ray's object store without copies and is stored
as one `.npz` file. Completion `i` answers prompt `i // group_size`. All per-token arrays are parallel to
`response_ids`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rljob_client.run_directory.durable_files import write_atomically

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a task."""

    index: int
    """Index of the item in the task, from 0."""

    token_ids: list[int]

    text: str

    item: dict[str, Any] = field(default_factory=dict)
    """The task's record, which the reward function receives."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One generated response."""

    token_ids: Sequence[int]
    """Includes the end-of-sequence token if the model emitted it. Empty if the model generated nothing."""

    logprobs: Sequence[float]
    """The engine's log-probability of each token (natural logarithm)."""

    finished: bool
    """True if the model ended the response; False if it was cut at the token limit."""

    text: str

    weights_versions: Sequence[int] = ()
    """The step whose weights generated each token. Empty: the same for all completions of the step."""

    def is_complete(self, max_tokens: int) -> bool:
        """False if the response was left before it ended. `max_tokens`: the token limit."""
        return self.finished or len(self.token_ids) >= max_tokens


@dataclass(frozen=True, slots=True)
class PartialGroup:
    """The responses to one prompt, finished or not. They have no text yet."""

    position: int
    """Position of the prompt in the sequence of all prompts of the job, from 0."""

    responses: Sequence[Completion]

    def is_complete(self, max_tokens: int) -> bool:
        """True if every response has ended. `max_tokens`: the token limit."""
        return all(response.is_complete(max_tokens) for response in self.responses)


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """All completions of one step: `prompts × group_size` of them."""

    step: int

    group_size: int
    """Completions of each prompt."""

    prompt_ids: list[IntArray]
    """Tokens of each prompt."""

    response_ids: list[IntArray]
    """Tokens of each completion."""

    rollout_logprobs: list[FloatArray]
    """The engine's log-probability of each token, parallel to `response_ids`."""

    finished: npt.NDArray[np.bool_]
    """[completions] True if the model ended the response; False if it was cut at the token limit."""

    rewards: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))
    """[completions]; empty until the step is scored."""

    advantages: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))
    """[completions]; empty until the step is scored."""

    reward_parts: dict[str, FloatArray] = field(default_factory=dict)
    """[completions] The unweighted rewards of each reward function, by its name; NaN for a response that it left out.
    Empty if the task has one reward function."""

    kept: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """[completions] False: the completion has no part in the update, nor in the statistics of its group. Empty: all
    have."""

    reward_errors: int = 0
    """Completions for which a reward function failed, and counts as 0."""

    weights_version: int | None = None
    """The step whose weights generated the completions; 0: the initial weights. None: unknown."""

    token_versions: list[IntArray] = field(default_factory=list)
    """The same for each token, parallel to `response_ids`. Empty: it is `weights_version` for all."""

    left: list[PartialGroup] = field(default_factory=list)
    """Groups that the step has left for the next one, in the order of their positions."""

    prompts_drawn: int = 0
    """Position, in the sequence of all prompts of the job, of the first prompt that a later step can have. 0: steps
    have equal numbers of prompts."""

    parts: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    """[prompts] The part of the update that has each group, from 0: parts are added to the gradient one after the
    other. Empty: there is one part, or `algorithm.updatesPerStep` divides the step."""

    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the generation and of the rewards, by name."""

    def __len__(self) -> int:
        return len(self.response_ids)

    @property
    def takes_part(self) -> npt.NDArray[np.bool_]:
        """[completions] `kept`, where an empty one means all."""
        return self.kept if len(self.kept) else np.ones(len(self), np.bool_)

    @property
    def response_tokens(self) -> int:
        return sum(len(ids) for ids in self.response_ids)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens that the policy processes: each prompt counts once per completion."""
        return self.group_size * sum(len(ids) for ids in self.prompt_ids)

    @property
    def continued(self) -> list[int]:
        """Number of tokens before the change of weights, for each completion that was continued with other weights."""
        last = [(versions, versions[-1]) for versions in self.token_versions if len(versions)]
        earlier = [int(np.count_nonzero(versions != final)) for versions, final in last]
        return [tokens for tokens in earlier if tokens]

    def scored(self, rewards: FloatArray, advantages: FloatArray, reward_errors: int = 0) -> RolloutBatch:
        """This batch with rewards and advantages, [completions] each."""
        return replace(
            self,
            rewards=rewards.astype(np.float32),
            advantages=advantages.astype(np.float32),
            reward_errors=reward_errors,
        )

    @classmethod
    def of(
        cls, step: int, group_size: int, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> RolloutBatch:
        """The batch, not scored yet. `completions`: group after group. Raises `ValueError` if their number is wrong."""
        if len(completions) != len(prompts) * group_size:
            raise ValueError(
                f"expected {len(prompts)} prompts × {group_size} completions, found {len(completions)} completions"
            )
        return cls(
            step=step,
            group_size=group_size,
            prompt_ids=[np.asarray(p.token_ids, np.int32) for p in prompts],
            response_ids=[np.asarray(c.token_ids, np.int32) for c in completions],
            rollout_logprobs=[np.asarray(c.logprobs, np.float32) for c in completions],
            finished=np.asarray([c.finished for c in completions], np.bool_),
            token_versions=_versions(completions),
        )

    def save(self, path: Path) -> None:
        """Write the batch durably as one `.npz` file, atomically: a file at `path` is always complete.

        Raises `OutputUnavailable` if it cannot be written, and then leaves no file.
        """
        buffer = io.BytesIO()
        np.savez(
            buffer,
            step=self.step,
            group_size=self.group_size,
            prompt_lengths=[len(ids) for ids in self.prompt_ids],
            prompt_ids=_flat(self.prompt_ids, np.int32),
            response_lengths=[len(ids) for ids in self.response_ids],
            response_ids=_flat(self.response_ids, np.int32),
            rollout_logprobs=_flat(self.rollout_logprobs, np.float32),
            finished=self.finished,
            rewards=self.rewards,
            advantages=self.advantages,
            kept=self.kept,
            reward_part_names=np.asarray(list(self.reward_parts), np.str_),
            reward_parts=np.asarray(list(self.reward_parts.values()), np.float32),
            reward_errors=self.reward_errors,
            weights_version=-1 if self.weights_version is None else self.weights_version,
            prompts_drawn=self.prompts_drawn,
            parts=self.parts,
            metric_names=np.asarray(list(self.metrics), np.str_),
            metric_values=np.asarray(list(self.metrics.values()), np.float64),
            token_versions=_flat(self.token_versions, np.int32),
            **_saved_groups(self.left),
        )
        write_atomically(path, buffer.getbuffer())

    @classmethod
    def load(cls, path: Path) -> RolloutBatch:
        with np.load(path, allow_pickle=False) as saved:
            return cls(
                step=int(saved["step"]),
                group_size=int(saved["group_size"]),
                prompt_ids=_split(saved["prompt_ids"], saved["prompt_lengths"]),
                response_ids=_split(saved["response_ids"], saved["response_lengths"]),
                rollout_logprobs=_split(saved["rollout_logprobs"], saved["response_lengths"]),
                finished=saved["finished"],
                rewards=saved["rewards"],
                advantages=saved["advantages"],
                reward_parts=dict(zip(saved["reward_part_names"].tolist(), saved["reward_parts"], strict=True)),
                kept=saved["kept"],
                reward_errors=int(saved["reward_errors"]),
                weights_version=None if saved["weights_version"] < 0 else int(saved["weights_version"]),
                token_versions=_split(saved["token_versions"], saved["response_lengths"])
                if len(saved["token_versions"])
                else [],
                left=_loaded_groups(saved),
                prompts_drawn=int(saved["prompts_drawn"]),
                parts=saved["parts"] if "parts" in saved else np.zeros(0, np.int32),  # of an earlier version
                metrics=dict(zip(saved["metric_names"].tolist(), saved["metric_values"].tolist(), strict=True)),
            )


def _versions(completions: Sequence[Completion]) -> list[IntArray]:
    found = [np.asarray(completion.weights_versions, np.int32) for completion in completions]
    return found if any(map(len, found)) else []


def _saved_groups(groups: Sequence[PartialGroup]) -> dict[str, Any]:
    responses = [response for group in groups for response in group.responses]
    return {
        "left_positions": np.asarray([group.position for group in groups], np.int64),
        "left_lengths": np.asarray([len(response.token_ids) for response in responses], np.int64),
        "left_ids": _flat([np.asarray(response.token_ids) for response in responses], np.int32),
        "left_logprobs": _flat([np.asarray(response.logprobs) for response in responses], np.float32),
        "left_versions": _flat([np.asarray(response.weights_versions) for response in responses], np.int32),
        "left_finished": np.asarray([response.finished for response in responses], np.bool_),
    }


def _loaded_groups(saved: Mapping[str, npt.NDArray[Any]]) -> list[PartialGroup]:
    lengths, positions = saved["left_lengths"], saved["left_positions"]
    parts = [_split(saved[f"left_{name}"], lengths) for name in ("ids", "logprobs", "versions")]
    responses = [
        Completion(ids.tolist(), logprobs.tolist(), bool(finished), "", versions.tolist())
        for ids, logprobs, versions, finished in zip(*parts, saved["left_finished"], strict=True)
    ]
    size = len(responses) // max(len(positions), 1)
    return [
        PartialGroup(int(position), responses[index * size : (index + 1) * size])
        for index, position in enumerate(positions)
    ]


def _flat(arrays: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype)


def _split(flat: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    return np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []
