"""Checks settings of torch's CUDA allocator without torch: its options, their values, the version that added them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Option:
    """One option."""

    since: tuple[int, int]
    """The first torch, from 2.6 on, whose parser knows it. An unknown option ends the process."""

    holds: Callable[[str], bool]
    """Returns True for a valid value."""

    expected: str
    """Valid values, for people."""


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", text) else float("nan")


def _switch(since: tuple[int, int] = (2, 6)) -> _Option:
    return _Option(since, lambda text: text in ("True", "False"), "True or False, spelt so")


def _fraction(since: tuple[int, int] = (2, 6)) -> _Option:
    return _Option(since, lambda text: 0 < _number(text) < 1, "a number between 0 and 1")


_MAX_DIGITS = 18
"""torch parses into 64 bits."""


def _is_whole(text: str) -> bool:
    """ASCII digits: `str.isdigit` also accepts ², which `int` does not."""
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS


def _megabytes(since: tuple[int, int] = (2, 6), least: int = 0) -> _Option:
    return _Option(since, lambda text: _is_whole(text) and int(text) >= least, f"whole MiB, at least {least}")


_OPTIONS = {
    "backend": _Option((2, 6), lambda text: text in ("native", "cudaMallocAsync"), "native or cudaMallocAsync"),
    "expandable_segments": _switch(),
    "expandable_segments_reserve": _Option((2, 15), bool, "a value"),
    "expandable_segments_reserve_by_class": _Option((2, 15), bool, "a value"),
    "garbage_collection_threshold": _fraction(),
    "graph_capture_record_stream_reuse": _switch((2, 9)),
    "large_segment_size_mb": _megabytes((2, 11), least=11),
    "max_non_split_rounding_mb": _megabytes(),
    "max_split_size_mb": _megabytes(least=20),
    "per_process_memory_fraction": _Option((2, 10), lambda text: 0 < _number(text) <= 1, "a number up to 1"),
    "pinned_free_catch_all": _switch((2, 12)),
    "pinned_max_cached_size_mb": _megabytes((2, 13)),
    "pinned_max_round_threshold_mb": _megabytes((2, 13)),
    "pinned_num_register_threads": _Option((2, 6), _is_whole, "a whole number"),
    "pinned_reserve_segment_size_mb": _megabytes((2, 10)),
    "pinned_use_background_threads": _switch(),
    "pinned_use_cuda_host_register": _switch(),
    "release_lock_on_cudamalloc": _switch(),
    "roundup_power2_divisions": _Option(
        (2, 6), lambda text: bool(re.fullmatch(r"[0-9]+|\[.+\]", text)), "a number or [size:number,…]"
    ),
    "throw_on_cudamalloc_oom": _switch((2, 12)),
}


LONGEST_SETTINGS = 2048
"""All options together have fewer characters. The search for commas takes quadratic time."""


def allocator_options(settings: str) -> dict[str, str]:
    """`{"expandable_segments": "True"}` for `expandable_segments:True`. A part without a value gets "".

    Beyond LONGEST_SETTINGS characters, the settings are not read.
    """
    parts = re.split(r",(?![^\[]*\])", settings[:LONGEST_SETTINGS])
    pairs = (part.partition(":") for part in parts if part.strip())
    return {name.strip(): value.strip() for name, _, value in pairs}


def setting_problems(settings: str, torch_version: tuple[int, int] | None) -> list[str]:
    """One sentence for each option in `settings` that torch's parser rejects, which ends the process.

    `torch_version`: None if it is unknown; then options are not checked against it.
    """
    if len(settings) > LONGEST_SETTINGS:
        return [f"expected at most {LONGEST_SETTINGS} characters, found {len(settings)}; remove options"]
    problems = []
    for name, value in allocator_options(settings).items():
        option = _OPTIONS.get(name)
        if option is None:
            problems.append(f"{name!r} is not an option of torch's CUDA allocator")
        elif torch_version and torch_version < option.since:
            since, found = (".".join(map(str, version)) for version in (option.since, torch_version))
            problems.append(f"{name} is known since torch {since}, and the image has torch {found}")
        elif not option.holds(value):
            problems.append(f"{name}: expected {option.expected}, found {value!r}")
    return problems
