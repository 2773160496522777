"""Experiment trackers, one row for each name, and the samples of responses that a run keeps.

To add a tracker, add a row, and a subclass of `Tracker` to `rljob_trainer.trackers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from rljob_api.api_model import ApiModel, FreeForm, Rule


class TrackerKind(NamedTuple):
    """A tracker by name. The class `NameTracker` in `name_tracker.py` of `rljob_trainer.trackers` implements it."""

    title: str
    """Its own spelling of its name."""

    data: str
    """Place of the data without a server, for the table of trackers in the docs."""

    package: str = ""
    """Python package of the library. Empty: it needs none."""

    function: str = ""
    """The function that receives `TrackerSpec.args`, as module:function. Empty: there is none."""

    further_args: tuple[str, ...] = ()
    """Arguments that the class takes itself."""

    project: str = ""
    """Its own names for `project` and `runName`. Empty: it has neither, and the setting is refused."""

    @property
    def arguments(self) -> str:
        """Description of its arguments."""
        function = [f"`{self.function.replace(':', '.')}`"] if self.function else []
        return ", ".join([*function, *(f"`{name}`" for name in self.further_args)])


TRACKERS: dict[str, TrackerKind] = {
    "csv": TrackerKind(
        "CSV files",
        "`csv/` of the output directory: `metrics.csv` with the columns `step`, `time`, `name` and `value`, where the "
        "last row of a step and name counts, and `notes.csv`",
        further_args=("logdir",),
    ),
    "mlflow": TrackerKind(
        "MLflow",
        "`mlflow.db` and `mlartifacts/` of the output directory, if neither `tracking_uri` nor `MLFLOW_TRACKING_URI` "
        "names a server, and the package `mlflow` is installed whole: `mlflow-skinny` needs a server",
        package="mlflow",
        function="mlflow:start_run",
        further_args=("tracking_uri",),
        project="experiment, name",
    ),
    "tensorboard": TrackerKind(
        "TensorBoard",
        "`tensorboard/` of the output directory",
        package="tensorboard",
        function="tensorboard.summary.writer.event_file_writer:EventFileWriter",
    ),
    "trackio": TrackerKind(
        "Trackio",
        "`trackio/` of the output directory: `TRACKIO_DIR=DIR/trackio trackio show`; with `TRACKIO_DIR`, there",
        package="trackio",
        function="trackio:init",
        project="project, name with a suffix",
    ),
    "wandb": TrackerKind(
        "W&B",
        "`wandb/` of the output directory, with `WANDB_MODE=offline`",
        package="wandb",
        function="wandb:init",
        project="project, name",
    ),
}

if TYPE_CHECKING:
    TrackerName = str
else:
    TrackerName = Literal[tuple(TRACKERS)]

RunText = Annotated[str, Field(min_length=1, max_length=253)]
_WITHOUT_PROJECT = [name for name, kind in TRACKERS.items() if not kind.project]


class TrackerSpec(ApiModel):
    """An experiment tracker to which the run reports. A tracker never stops or delays the run."""

    name: TrackerName
    """Name of the tracker: wandb is Weights & Biases."""

    project: RunText | None = None
    """Project of the run in the tracker; in MLflow, the experiment. Absent: rljob."""

    run_name: RunText | None = None
    """Name of the run in the tracker. Absent: the name of the job."""

    args: FreeForm = Field(
        default_factory=dict,
        description="Further arguments of the tracker, such as entity and tags of W&B. "
        + "; ".join(f"{name}: {kind.arguments.replace('`', '')}" for name, kind in TRACKERS.items())
        + ". Write keys and passwords as variables in env (WANDB_API_KEY, MLFLOW_TRACKING_TOKEN), from a Secret.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"!(self.name in {_WITHOUT_PROJECT}) || (!has(self.project) && !has(self.runName))",
            holds=lambda tracker: tracker.name not in _WITHOUT_PROJECT or tracker.project is tracker.run_name is None,
            field="name",
            message="this tracker has neither projects nor names of runs: remove project and runName, or write another "
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
