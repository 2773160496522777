"""The layout of packed sequences: their bounds, those of the sequences that others continue, and positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

BOUNDS = ("bounds", "prompt_bounds", "response_bounds")
"""Names of the bounds in `packing_of`."""


class Sizes(NamedTuple):
    """Numbers of tokens, which the kernel needs on the host."""

    longest: int
    """In the longest sequence, or more, as in all that follow with this name: a power of two."""

    prompts: int
    """In all sequences that others continue. They are the first ones."""

    first: int
    """Before the first sequence that continues another."""

    last: int
    """Up to the end of the last sequence that continues another."""

    longest_prompt: int
    """In the longest sequence that others continue."""

    longest_responses: int
    """In all sequences that continue the same one."""


def packing_of(lengths: Sequence[int], continued: Sequence[int] = ()) -> dict[str, Any]:
    """Arguments of the model, by name, for sequences of `lengths` in the only row of its L tokens.

    `continued`: the number of sequences that continue each of the first ones, such as responses to one prompt; only the
    last numbers may be 0. They stand after these, in the same order. A sequence that continues another attends to it,
    too, and has the positions after its own.

    `position_ids`: [1, L] int64. `bounds`: [sequences + 1] the first token of each sequence, and L. `prompt_bounds`:
    [prompts + 1] the same for the sequences that others continue; `response_bounds`: [prompts + 1] for those that
    continue each, counted from the first of all. All bounds are int32. `sizes`: `Sizes`.
    """
    first = len(continued)
    begins = [0] * len(lengths)
    for place, prompt in enumerate(np.repeat(np.arange(first), continued).tolist(), start=first):
        begins[place] = lengths[prompt]
    positions = [np.arange(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]
    bounds = np.cumsum([0, *lengths])
    prompts = max(sum(count > 0 for count in continued), 1)  # without any, one that nothing continues
    responses = bounds[np.cumsum([first, *continued, 0])][: prompts + 1]
    sizes = (
        _rounded(max(lengths)),
        bounds[prompts],
        responses[0],
        responses[-1],
        _rounded(np.diff(bounds[: prompts + 1]).max()),
        _rounded(np.diff(responses).max()),
    )
    return {
        "position_ids": torch.from_numpy(np.concatenate(positions)[None]),
        "bounds": torch.from_numpy(bounds.astype(np.int32)),
        "prompt_bounds": torch.from_numpy(bounds[: prompts + 1].astype(np.int32)),
        "response_bounds": torch.from_numpy((responses - responses[0]).astype(np.int32)),
        "sizes": Sizes(*map(int, sizes)),
    }


def _rounded(tokens: int) -> int:
    """A power of two of at least 2. Kernels are compiled for some lengths; with queries of one token, that of torch
    gives the normalizers another layout."""
    return max(2, 1 << (int(tokens) - 1).bit_length())
