"""`rljob show`: samples of a run's responses as a person reads them, in the form of the run's own terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rljob_client.run_directory.reward_trend import reward_text
from rljob_client.run_directory.samples import FILE_NAME, Sample, SampleKind, read_samples

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""A response may contain anything, such as escape sequences that a terminal would obey."""

_LABEL_COLUMNS = 11


def show(directory: Path, step: int | None, kind: SampleKind | None, *, as_json: bool) -> int:
    """Print the samples of `step`, of the last one if it is None, and return the exit code: 1 if there are none."""
    path = directory / FILE_NAME
    samples = [sample for sample in read_samples(path) if kind in (None, sample.kind)]
    steps = sorted({sample.step for sample in samples})
    wanted = steps[-1] if steps and step is None else step
    found = [sample for sample in samples if sample.step == wanted]
    if not found:
        print(f"rljob: {_none_found(path, steps, step, kind)}", file=sys.stderr)
        return 1
    if as_json:
        print("[" + ",\n".join(sample.model_dump_json() for sample in found) + "]")
    else:
        console = Console(emoji=False, highlight=False)
        console.print(sample_view(found, console.width))
    return 0


def _none_found(path: Path, steps: list[int], step: int | None, kind: SampleKind | None) -> str:
    named = f"{kind} samples" if kind else "samples"
    if steps:
        shown = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0])
        return f"expected {named} of step {step} in {path}, found those of {shown}; give one of these as --step"
    if path.is_file():
        return f"expected {named} in {path}, found none; give another --kind, or wait for a step"
    return (
        f"expected the file {path}, found none; give the output directory of a run that keeps samples "
        "(spec.samples.perStep above 0) and has scored a step"
    )


def sample_view(samples: Sequence[Sample], width: int, most_lines: int | None = None) -> RenderableType:
    """The samples, below each other. `width`: columns of the terminal. `most_lines`: of each text; None: all."""
    parts: list[RenderableType] = []
    for sample in samples:
        table = Table.grid(padding=(0, 1, 0, 0))
        table.add_column(style="dim", width=_LABEL_COLUMNS)
        table.add_column(overflow="fold")
        for label, text in (("  prompt", sample.prompt), ("  response", sample.response)):
            table.add_row(label, _shown(text, width - _LABEL_COLUMNS - 2, most_lines))
        parts += [Text(_heading(sample), "bold", overflow="fold"), table]
    return Group(*parts)


def _heading(sample: Sample) -> str:
    """`sample of step 10  prompt 3  reward 1.000 (format 0.5)  advantage +0.71  12 tokens, cut`."""
    of_each = ", ".join(f"{name} {'–' if part is None else f'{part:.3g}'}" for name, part in sample.rewards.items())
    parts = [
        f"{'sample' if sample.kind == 'train' else 'evaluation sample'} of step {sample.step}",
        f"prompt {sample.prompt_index}",
        f"reward {reward_text(sample.reward)}" + (f" ({of_each})" if of_each else ""),
        *([f"advantage {sample.advantage:+.2f}"] if sample.advantage is not None else []),
        f"{sample.tokens} tokens" + ("" if sample.finished else ", cut"),
    ]
    return "  ".join(parts)


def _shown(text: str, width: int, most_lines: int | None) -> Text:
    """The text, or its first and last lines, as wide as the column."""
    visible = _CONTROL.sub(lambda found: repr(found[0])[1:-1], text.strip("\n")) or "(empty)"
    lines = Text(visible).wrap(Console(width=width), width, tab_size=4)
    if most_lines is None or len(lines) <= most_lines:
        return Text(visible)
    last = most_lines // 2
    left_out = Text(f"… {len(lines) - most_lines} more lines …", "dim")
    return Text("\n").join([*lines[: most_lines - last], left_out, *lines[-last:]])
