"""Allocator settings that torch's CUDA allocator would refuse."""

from __future__ import annotations

import pytest

from rljob_memory.allocator_settings import allocator_options, setting_problems


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ("", {}),
        ("expandable_segments:True", {"expandable_segments": "True"}),
        (" a : 1 , b:2,", {"a": "1", "b": "2"}),
        ("roundup_power2_divisions:[256:1,512:2],a:1", {"roundup_power2_divisions": "[256:1,512:2]", "a": "1"}),
        ("garbage", {"garbage": ""}),
    ],
)
def test_a_string_is_read_as_torch_reads_it(settings: str, options: dict[str, str]) -> None:
    assert allocator_options(settings) == options


@pytest.mark.parametrize(
    "settings",
    [
        "",
        "expandable_segments:True,max_split_size_mb:128",
        "backend:cudaMallocAsync",
        "garbage_collection_threshold:0.8",
        "garbage_collection_threshold:.8",
        "roundup_power2_divisions:[256:1,>:4]",
        "roundup_power2_divisions:4",
        "pinned_num_register_threads:8",
    ],
)
def test_options_of_every_torch_version_are_accepted(settings: str) -> None:
    assert setting_problems(settings, (2, 6)) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("expandable_segments:true", "expandable_segments: expected True or False, spelt so, found 'true'"),
        ("max_split_size_mb:8", "max_split_size_mb: expected whole MiB, at least 20, found '8'"),
        ("large_segment_size_mb:10", "large_segment_size_mb: expected whole MiB, at least 11, found '10'"),
        ("garbage_collection_threshold:1.0", "expected a number between 0 and 1, found '1.0'"),
        ("garbage_collection_threshold:most", "expected a number between 0 and 1, found 'most'"),
        ("backend:native2", "expected native or cudaMallocAsync, found 'native2'"),
        ("expandable_segment:True", "'expandable_segment' is not an option of torch's CUDA allocator"),
        ("garbage", "'garbage' is not an option"),
    ],
)
def test_options_that_torch_refuses_are_reported(settings: str, said: str) -> None:
    (problem,) = setting_problems(settings, (2, 13))
    assert said in problem


@pytest.mark.parametrize(
    ("version", "problems"),
    [((2, 9), ["per_process_memory_fraction is known since torch 2.10, and the image has torch 2.9"]), ((2, 10), [])],
)
def test_an_option_of_a_later_version_is_reported(version: tuple[int, int], problems: list[str]) -> None:
    assert setting_problems("per_process_memory_fraction:1.0", version) == problems


def test_without_a_known_torch_no_option_is_too_new() -> None:
    assert setting_problems("expandable_segments_reserve:1", None) == []
