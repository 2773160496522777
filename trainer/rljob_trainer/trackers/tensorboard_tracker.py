"""TensorBoard. Written by the package `tensorboard` itself: `torch.utils.tensorboard` would import torch."""

from __future__ import annotations

import json
import time as clock
from collections.abc import Mapping, Sequence
from typing import Any

from rljob_client.run_directory.samples import Sample
from rljob_trainer.trackers.tracker import SAMPLE_COLUMNS, Status, TrackedRun, Tracker, rows


class TensorboardTracker(Tracker):
    """Event files in `tensorboard/` of the output directory, or in `args.logdir`."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        args = dict(run.spec.args)
        self.run_id = str(args.pop("logdir", "tensorboard"))
        self._events, self._summaries, self._tensors, self._string = event_pb2, summary_pb2, tensor_pb2, DT_STRING
        self._writer = EventFileWriter(str(run.directory / self.run_id), **args)
        # Readers then drop the steps of earlier files from this one on.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(event_pb2.Event(wall_time=clock.time(), step=run.next_step, session_log=start))
        if run.run_id != self.run_id:
            self._text(
                "manifest", "\n".join(f"    {line}" for line in json.dumps(run.config, indent=2).splitlines()), 0
            )

    def log(self, values: Mapping[str, float], step: int, time: float) -> None:
        entries = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(entries, step, time)

    def samples(self, samples: Sequence[Sample], step: int) -> None:
        lines = [_row(SAMPLE_COLUMNS), _row(["---"] * len(SAMPLE_COLUMNS)), *map(_row, rows(samples))]
        self._text(f"samples/{samples[0].kind}", "\n".join(lines), step)

    def note(self, title: str, text: str, step: int) -> None:
        self._text(f"notes/{title}", text, step)

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        self._text("summary", "\n".join(f"- {name}: {value}" for name, value in summary.items()), int(summary["steps"]))
        self._writer.close()

    def _text(self, tag: str, markdown: str, step: int) -> None:
        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        metadata = self._summaries.SummaryMetadata(plugin_data=plugin)
        tensor = self._tensors.TensorProto(dtype=self._string, string_val=[markdown.encode()])
        self._add([self._summaries.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)], step, clock.time())

    def _add(self, entries: Sequence[Any], step: int, time: float) -> None:
        summary = self._summaries.Summary(value=entries)
        self._writer.add_event(self._events.Event(wall_time=time, step=step, summary=summary))
        self._writer.flush()


def _row(cells: Sequence[Any]) -> str:
    """A row of a Markdown table."""
    texts = (str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in cells)
    return f"| {' | '.join(texts)} |"
