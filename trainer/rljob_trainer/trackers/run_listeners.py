"""Everything that listens to a run: the reports to the operator, the trackers, the samples."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rljob_api.job import RLJob
from rljob_client.run_directory.records import LedgerRecord
from rljob_client.run_directory.samples import FILE_NAME
from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.run_listener import Listeners, RunListener
from rljob_trainer.trackers.registry import is_installed
from rljob_trainer.trackers.sample_log import SampleLog
from rljob_trainer.trackers.tracker import CLOSE_SECONDS
from rljob_trainer.trackers.tracker_listener import TrackerListener


@contextmanager
def run_listeners(
    job: RLJob, directory: Path, records: Sequence[LedgerRecord], listener: RunListener, display: RunDisplay
) -> Iterator[RunListener]:
    """`listener`, and those that the job asks for. At the end of the block, the trackers are closed.

    `directory`: output directory. `records`: the ledger's. A tracker that is not installed is left out: the attempt is
    refused because of it.
    """
    trackers = [
        TrackerListener(spec, job, directory, records, display.warning)
        for spec in job.spec.tracking or ()
        if is_installed(spec)
    ]
    show = [display.samples, *(tracker.samples for tracker in trackers)]
    samples = SampleLog(directory / FILE_NAME, job.spec.samples, show, display.warning)
    try:
        yield Listeners(listener, samples, *trackers)
    finally:
        if trackers:
            display.phase("closing the trackers")
        deadline = time.monotonic() + CLOSE_SECONDS
        for tracker in trackers:
            tracker.close(deadline)
