"""The samples of prompts and responses in a report."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TypeVar

from rljob_client.run_directory.reward_trend import reward_text
from rljob_client.run_directory.samples import Sample

Item = TypeVar("Item")

_MOST_STEPS = 8
_MOST_SAMPLES = 8
"""Samples of a step, from the highest reward to the lowest."""
_LONGEST_TEXT = 4000
"""Characters of a prompt or a response."""


def samples_section(samples: Sequence[Sample]) -> str:
    """Samples of the first, the last, and some steps between them; empty without samples. The last step is open."""
    steps = sorted({(sample.step, sample.kind) for sample in samples})
    if not steps:
        return ""
    shown = spread(steps, _MOST_STEPS)
    note = f"{len(shown)} of {len(steps)} steps with samples; samples.jsonl has all." if len(shown) < len(steps) else ""
    parts = [f"<p>{note}</p>"] if note else []
    for step, kind in reversed(shown):
        own = [sample for sample in samples if (sample.step, sample.kind) == (step, kind)]
        chosen = spread(sorted(own, key=lambda sample: -sample.reward), _MOST_SAMPLES)
        heading = f"{'Evaluation after step' if kind == 'evaluation' else 'Step'} {step}: {len(chosen)} of {len(own)}"
        opened = " open" if (step, kind) == shown[-1] else ""
        parts.append(f"<details{opened}><summary>{heading} samples</summary>{''.join(map(_card, chosen))}</details>")
    return "".join(parts)


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` of the items: the first, the last, and some between them at equal distances."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def _card(sample: Sample) -> str:
    parts = [f"reward {reward_text(sample.reward)}"]
    parts += [
        f"{name} {'left out' if value is None else reward_text(value)}"
        for name, value in sample.rewards.items()
        if len(sample.rewards) > 1
    ]
    if sample.advantage is not None:
        parts.append(f"advantage {sample.advantage:+.3f}")
    parts.append(f"{sample.tokens:,} tokens{'' if sample.finished else ', truncated'}")
    return (
        f'<article class="sample"><p>{escape(" · ".join(parts))}</p>'
        f"<h4>Prompt {sample.prompt_index}</h4><pre>{_cut(sample.prompt)}</pre>"
        f"<h4>Response</h4><pre>{_cut(sample.response)}</pre></article>"
    )


def _cut(text: str) -> str:
    if len(text) <= _LONGEST_TEXT:
        return escape(text)
    return f"{escape(text[:_LONGEST_TEXT])}<i> … {len(text) - _LONGEST_TEXT:,} more characters</i>"
