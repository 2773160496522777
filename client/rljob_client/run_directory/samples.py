"""Samples of prompts and responses: `samples.jsonl`, one JSON object a line."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from rljob_api.bounds import storable


class Sample(BaseModel):
    """A response, with its prompt and its rewards."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    _storable = model_validator(mode="before")(storable)

    step: int
    kind: Literal["train", "evaluation"] = "train"

    prompt_index: int
    """Position of the prompt in the step."""

    prompt: str
    response: str
    reward: float

    rewards: dict[str, float | None] = {}
    """Reward by function; None: the function left the response out."""

    advantage: float | None = None
    finished: bool
    """False: cut at the token limit."""

    tokens: int
    """Length of the response."""


def read_samples(path: Path, step: int | None = None) -> list[Sample]:
    """The samples of one step, or of all; none without a file. Lines that are not samples are left out."""
    samples: list[Sample] = []
    with suppress(FileNotFoundError), path.open("rb") as lines:
        for line in lines:
            with suppress(ValidationError):
                sample = Sample.model_validate_json(line)
                if step is None or sample.step == step:
                    samples.append(sample)
    return samples
