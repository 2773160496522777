"""Experiment trackers, and the samples of responses that a run keeps."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rljob_api.api_model import ApiModel, FreeForm, Rule

TrackerName = Literal["mlflow", "tensorboard", "trackio", "wandb"]
RunText = Annotated[str, Field(min_length=1, max_length=253)]


class TrackerSpec(ApiModel):
    """An experiment tracker to which the run reports. A tracker never stops or delays the run."""

    name: TrackerName
    """Name of the tracker: wandb is Weights & Biases."""

    project: RunText | None = None
    """Project of the run in W&B and Trackio, experiment in MLflow. Absent: rljob."""

    run_name: RunText | None = None
    """Name of the run in the tracker. Absent: the name of the job."""

    args: FreeForm = Field(default_factory=dict)
    """Further arguments of the library's own function, such as entity and tags: wandb.init, mlflow.start_run (also
    tracking_uri), trackio.init, or EventFileWriter of TensorBoard. Write keys and passwords as variables in env
    (WANDB_API_KEY, MLFLOW_TRACKING_TOKEN), from a Secret."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.name != 'tensorboard' || (!has(self.project) && !has(self.runName))",
            holds=lambda tracker: tracker.name != "tensorboard" or tracker.project is tracker.run_name is None,
            field="name",
            message="TensorBoard has neither projects nor names of runs: remove project and runName, or write another "
            "directory as args: {logdir: …}",
        ),
    )


class SamplesSpec(ApiModel):
    """Prompts and responses that the run keeps in samples.jsonl, with their rewards."""

    per_step: int = Field(default=4, ge=0, le=256)
    """Responses to keep of each step, of prompts at even distances. 0: keep no text, show none and send none to a
    tracker."""

    show_every_steps: int = Field(default=10, ge=0, le=1_000_000)
    """Steps between samples on the terminal and in the trackers, after those of the first step. 0: show none, and send
    none to a tracker."""
