"""MLflow."""

from __future__ import annotations

import os
import re
import time as clock
from collections.abc import Mapping, Sequence
from typing import Any

from rljob_client.run_directory.samples import Sample
from rljob_trainer.trackers.tracker import SAMPLE_COLUMNS, Status, TrackedRun, Tracker, rows
from rljob_trainer.trackers.values import flat

_LONGEST_VALUE = 5000
"""Characters of a parameter or a tag; servers refuse more than 6,000, or 8,000 of a tag."""

_MOST_PARAMETERS = 100
"""Parameters of one request."""

_NOT_IN_A_NAME = re.compile(r"[^\w\-. :/]")

_STATUS = {"Complete": "FINISHED", "Stopped": "KILLED", "Failed": "FAILED"}


class MlflowTracker(Tracker):
    """A run in MLflow, on the server of MLFLOW_TRACKING_URI or `args.tracking_uri`."""

    def __init__(self, run: TrackedRun) -> None:
        import mlflow
        from mlflow.entities import Metric

        args = dict(run.spec.args)
        uri = args.pop("tracking_uri", None) or os.environ.get("MLFLOW_TRACKING_URI")
        directory = run.directory.absolute()
        mlflow.set_tracking_uri(uri or f"sqlite:///{directory / 'mlflow.db'}")
        self._mlflow, self._metric = mlflow, Metric
        self._client = mlflow.MlflowClient()
        if uri is None and self._client.get_experiment_by_name(run.project) is None:
            # Without a location, tables of samples would be in the working directory.
            self._client.create_experiment(run.project, artifact_location=(directory / "mlartifacts").as_uri())
        mlflow.set_experiment(run.project)
        is_resumed = run.run_id is not None and self._exists(run.run_id)
        args = {"run_id": run.run_id} if is_resumed else {"run_name": run.name, **args}
        self.run_id = mlflow.start_run(**args).info.run_id
        if not is_resumed:  # parameters cannot change
            parameters = {_name(name): str(value)[:_LONGEST_VALUE] for name, value in flat(run.config, ".")}
            names = list(parameters)
            for start in range(0, len(names), _MOST_PARAMETERS):
                mlflow.log_params({name: parameters[name] for name in names[start : start + _MOST_PARAMETERS]})

    def _exists(self, run_id: str) -> bool:
        """False if the run was deleted."""
        from mlflow.exceptions import MlflowException

        try:
            return str(self._client.get_run(run_id).info.lifecycle_stage) == "active"
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise

    def log(self, values: Mapping[str, float], step: int, time: float) -> None:
        at = int(time * 1000)
        metrics = [self._metric(_name(name), float(value), at, step) for name, value in values.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def samples(self, samples: Sequence[Sample], step: int) -> None:
        columns = dict(zip(SAMPLE_COLUMNS, zip(*rows(samples), strict=True), strict=True))
        table = {name: list(column) for name, column in columns.items()}
        self._client.log_table(self.run_id, table, f"samples/{samples[0].kind}-{step:06}.json")

    def note(self, title: str, text: str, step: int) -> None:
        self._client.set_tag(self.run_id, _name(f"rljob.{title}.step-{step}"), text[:_LONGEST_VALUE])

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in summary.items() if isinstance(value, int | float)}
        self.log({f"summary/{name}": value for name, value in numbers.items()}, 0, clock.time())
        for name in summary.keys() - numbers:
            self._client.set_tag(self.run_id, _name(f"rljob.{name}"), str(summary[name])[:_LONGEST_VALUE])
        self._mlflow.end_run(_STATUS[status])


def _name(name: str) -> str:
    """A name that MLflow accepts: `avg_8` for `avg@8`."""
    return _NOT_IN_A_NAME.sub("_", name)
