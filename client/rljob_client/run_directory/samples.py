"""`samples.jsonl`: some prompts and responses of a run, with their rewards. One JSON object a line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rljob_api.bounds import storable

FILE_NAME = "samples.jsonl"

SampleKind = Literal["train", "evaluation"]


class Sample(BaseModel):
    """One response to a prompt."""

    # Other programs may add fields. JSON has no NaN, but a line with one must remain valid for other readers.
    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")

    _storable = model_validator(mode="before")(storable)

    step: int = Field(ge=0)
    """The step that was trained on the response; of an evaluation, the last committed step before it."""

    kind: SampleKind

    prompt_index: int = Field(ge=0)
    """Index of the item in the task, from 0."""

    prompt: str
    """Text of the prompt; a long one is cut in the middle."""

    response: str
    """Text of the response; a long one is cut in the middle."""

    reward: float

    rewards: dict[str, float | None] = {}
    """The unweighted rewards by name of the reward function; null if it left the response out. Empty if the task has
    one function."""

    advantage: float | None
    """Null for an evaluation."""

    finished: bool
    """True if the model ended the response; false if it was cut at the token limit."""

    tokens: int = Field(ge=0)
    """Length of the response."""

    scored_at: float = 0.0
    """Seconds since the epoch, the same for all samples that were scored together."""


def earlier_samples(path: Path) -> Path:
    """The file with the samples before those of the file `path`, which was full."""
    return path.with_name(f"{path.name}.old")


def read_samples(path: Path, step: int | None = None) -> list[Sample]:
    """The samples in the file `path`, in their order; empty if there is none. `step`: only those of this step.

    If a step was scored twice, because of a failure, the later samples replace the earlier ones. Lines that are not
    samples are skipped, such as one that is being written.
    """
    latest: dict[tuple[str, int], list[Sample]] = {}
    for sample in _lines(path):
        if step is None or sample.step == step:
            together = latest.setdefault((sample.kind, sample.step), [])
            if together and together[0].scored_at != sample.scored_at:
                together.clear()
            together.append(sample)
    return [sample for samples in latest.values() for sample in samples]


def _lines(path: Path) -> Iterator[Sample]:
    for part in (earlier_samples(path), path):
        with suppress(FileNotFoundError), part.open("rb") as lines:
            for line in lines:
                with suppress(ValidationError):
                    yield Sample.model_validate_json(line)
