"""`rljob show`: prints samples of a run's responses."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from rljob_client.run_directory.samples import FILE_NAME, Sample, SampleKind, read_samples
from rljob_client.sample_view import sample_view


def show(directory: Path, step: int | None, kind: SampleKind | None, *, as_json: bool) -> int:
    """Print the samples of `step`, of the last one if it is None, and return the exit code: 1 if there are none."""
    path = directory / FILE_NAME
    samples = [sample for sample in read_samples(path) if kind in (None, sample.kind)]
    wanted = max((sample.step for sample in samples), default=None) if step is None else step
    found = [sample for sample in samples if sample.step == wanted]
    if not found:
        print(f"rljob: {_none_found(path, samples, step, kind)}", file=sys.stderr)
        return 1
    if as_json:
        print("[" + ",\n".join(sample.model_dump_json() for sample in found) + "]")
    else:
        console = Console(emoji=False, highlight=False)
        console.print(sample_view(found, console.width))
    return 0


def _none_found(path: Path, samples: list[Sample], step: int | None, kind: SampleKind | None) -> str:
    named = f"{kind} samples" if kind else "samples"
    if samples:
        steps = sorted({sample.step for sample in samples})
        shown = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0])
        return f"expected {named} of step {step} in {path}, found those of {shown}; give one of these as --step"
    if path.is_file():
        return f"expected {named} in {path}, found none; give another --kind, or wait for a step"
    return (
        f"expected the file {path}, found none; give the output directory of a run that keeps samples "
        "(spec.samples.perStep above 0) and has scored a step"
    )
