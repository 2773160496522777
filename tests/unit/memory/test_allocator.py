"""Settings of torch's CUDA allocator: the environment of each role, and settings that the allocator would refuse."""

from __future__ import annotations

import pytest

from rljob_api.api_model import Toggle
from rljob_memory.allocator import (
    allocator_environment,
    allocator_options,
    other_trainer_environment,
    setting_problems,
    torch_release,
)


def test_the_controller_sees_no_gpu() -> None:
    assert allocator_environment("controller", "2.13.0") == {
        "CUDA_VISIBLE_DEVICES": "",
        "NVIDIA_VISIBLE_DEVICES": "void",
    }


@pytest.mark.parametrize("version", ["2.6.0", "2.9.1", "2.13.0+cpu", "3.0.0a0+git1234"])
def test_gpu_roles_start_with_classic_segments_in_any_torch_version(version: str) -> None:
    expected = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}
    assert allocator_environment("policy", version) == allocator_environment("rollout", version) == expected


@pytest.mark.parametrize(
    ("version", "said"), [("2.5.1", "expected torch 2.6"), ("nightly", "expected a torch version")]
)
def test_a_torch_that_is_too_old_or_unknown_is_refused(version: str, said: str) -> None:
    assert torch_release("2.13.0+cpu") == (2, 13)
    with pytest.raises(ValueError, match=said):
        allocator_environment("policy", version)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("Auto", {}),
        ("Enabled", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ("Disabled", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}),
    ],
)
def test_another_trainer_gets_only_pinned_settings(setting: Toggle, expected: dict[str, str]) -> None:
    assert other_trainer_environment(setting) == expected


def test_torch_understands_the_setting() -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        pytest.skip("torch before 2.10 reads allocator settings only where there is a GPU")
    [setting] = allocator_environment("policy", torch.__version__).values()
    torch._C._accelerator_setAllocatorSettings(setting)
    with pytest.raises((ValueError, RuntimeError)):
        torch._C._accelerator_setAllocatorSettings(setting.lower())


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
    ("settings", "said"),
    [
        ("", None),
        ("expandable_segments:True,max_split_size_mb:128", None),
        ("backend:cudaMallocAsync", None),
        ("garbage_collection_threshold:0.8", None),
        ("garbage_collection_threshold:.8", None),
        ("roundup_power2_divisions:[256:1,>:4]", None),
        ("roundup_power2_divisions:4", None),
        ("pinned_num_register_threads:8", None),
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
def test_options_that_torch_refuses_are_reported(settings: str, said: str | None) -> None:
    problems = setting_problems(settings, (2, 13) if said else (2, 6))
    assert len(problems) == (said is not None)
    assert all(said in problem for problem in problems if said)


@pytest.mark.parametrize(
    ("version", "problems"),
    [
        ((2, 9), ["per_process_memory_fraction is known since torch 2.10, and the image has torch 2.9"]),
        ((2, 10), []),
        (None, []),
    ],
)
def test_an_option_of_a_later_version_is_reported(version: tuple[int, int] | None, problems: list[str]) -> None:
    assert setting_problems("per_process_memory_fraction:1.0", version) == problems
