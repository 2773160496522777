"""Environment variables of torch's CUDA allocator for each role. torch reads them once, when a process starts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from rljob_api.api_model import Toggle
from rljob_api.status import Role

ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
"""The one name that every torch reads for CUDA: 2.9 ignores `PYTORCH_ALLOC_CONF`, later ones read it only if this
one is absent, and vLLM before 0.31 looks at this one alone."""

IGNORED_ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"
"""The newer name, which no torch reads if `ALLOCATOR_VARIABLE` is set."""

NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void"}
"""Hides every GPU, from CUDA and from NVIDIA's container runtime, which shows all GPUs to a container that requests
none."""

_OLDEST_TORCH = (2, 6)


def allocator_environment(role: Role, torch_version: str) -> dict[str, str]:
    """Environment variables of a process of `role` of RLJob's own trainer, to be set before it starts.

    - controller: no GPU is visible, so no stray call can put a CUDA context on a GPU that the controller does not use.
    - rollout: expandable segments are off. vLLM's custom all-reduce with CUDA graphs crashes with them, and the sleep
      mode's memory pool gains nothing from them.
    - policy: expandable segments are off at the start too, even if the plan enables them. The policy switches them on
      once the model is built: the weights are then in classic memory, which CUDA IPC can export without the
      privileges (pidfd_getfd) that expandable segments need.

    Raises ValueError if `torch_version` is older than 2.6: its allocator cannot be switched as the plan needs.
    """
    if torch_release(torch_version) < _OLDEST_TORCH:
        raise ValueError(f"expected torch 2.6 or newer, found {torch_version}; install a newer torch")
    if role == "controller":
        return dict(NO_GPU)
    return {ALLOCATOR_VARIABLE: "expandable_segments:False"}


def other_trainer_environment(expandable_segments: Toggle) -> dict[str, str]:
    """Environment variables of a process of another trainer, in options that every torch since 2.6 knows.

    Auto sets nothing: expandable segments may break a trainer that runs vLLM in the same process.
    """
    if expandable_segments == "Auto":
        return {}
    return {ALLOCATOR_VARIABLE: f"expandable_segments:{expandable_segments == 'Enabled'}"}


def torch_release(version: str) -> tuple[int, int]:
    """(2, 13) for 2.13.0+cpu. Raises ValueError if it is not a version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found:
        raise ValueError(f"expected a torch version such as 2.13.0, found {version!r}")
    return int(found[1]), int(found[2])


# Checks settings of torch's CUDA allocator without torch: its options, their values, the version that added them.


@dataclass(frozen=True, slots=True)
class _Option:
    """One option."""

    since: tuple[int, int]
    """The first torch, from 2.6 on, whose parser knows it. An unknown option ends the process."""

    holds: Callable[[str], bool]
    """Returns True for a valid value."""

    expected: str
    """Description of valid values, for messages."""


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", text) else float("nan")


def _switch(since: tuple[int, int] = (2, 6)) -> _Option:
    return _Option(since, lambda text: text in ("True", "False"), "True or False, spelt so")


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
    "garbage_collection_threshold": _Option((2, 6), lambda text: 0 < _number(text) < 1, "a number between 0 and 1"),
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
    """One message for each option in `settings` that torch's parser rejects, which ends the process.

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
