"""Samples of responses as a person reads them, on the terminal of a run and by `rljob show`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rljob_client.run_directory.reward_trend import reward_text
from rljob_client.run_directory.samples import Sample

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""A response may contain anything, such as escape sequences that a terminal would obey."""

_LABEL_COLUMNS = 11


def sample_view(samples: Sequence[Sample], width: int, most_lines: int | None = None) -> RenderableType:
    """The samples, below each other. `width`: columns of the terminal. `most_lines`: of each text; None: all."""
    return Group(*(part for sample in samples for part in _parts(sample, width, most_lines)))


def _parts(sample: Sample, width: int, most_lines: int | None) -> Iterator[RenderableType]:
    yield Text(_heading(sample), "bold", overflow="fold")
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="dim", width=_LABEL_COLUMNS)
    table.add_column(overflow="fold")
    for label, text in (("  prompt", sample.prompt), ("  response", sample.response)):
        table.add_row(label, _shown(text, width - _LABEL_COLUMNS - 2, most_lines))
    yield table


def _heading(sample: Sample) -> str:
    """`step 10  prompt 3  reward 1.000 (format 0.500)  advantage +0.71  12 tokens, cut at the limit`."""
    of_each = ", ".join(f"{name} {'–' if part is None else f'{part:.3g}'}" for name, part in sample.rewards.items())
    parts = [
        f"step {sample.step}" + (" evaluation" if sample.kind == "evaluation" else ""),
        f"prompt {sample.prompt_index}",
        f"reward {reward_text(sample.reward)}" + (f" ({of_each})" if of_each else ""),
        *([f"advantage {sample.advantage:+.2f}"] if sample.advantage is not None else []),
        f"{sample.tokens} tokens" + ("" if sample.finished else ", cut at the limit"),
    ]
    return "  ".join(parts)


def _shown(text: str, width: int, most_lines: int | None) -> Text:
    """The text, or its first and last lines, as wide as the column."""
    visible = _CONTROL.sub(lambda found: repr(found[0])[1:-1], text.strip("\n")) or "(empty)"
    if most_lines is None:
        return Text(visible)
    lines = Text(visible).wrap(Console(width=width), width, tab_size=4)
    if len(lines) <= most_lines:
        return Text(visible)
    first = (most_lines + 1) // 2
    last = most_lines - first
    left_out = Text(f"… {len(lines) - most_lines} more lines …", "dim")
    return Text("\n").join([*lines[:first], left_out, *lines[len(lines) - last :]])
