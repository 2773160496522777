"""The environment of each role's processes."""

from __future__ import annotations

import pytest

from rljob_api.api_model import Toggle
from rljob_api.status import Role
from rljob_memory.allocator import allocator_environment, other_trainer_environment, torch_release


def test_the_controller_sees_no_gpu() -> None:
    assert allocator_environment("controller", "2.13.0") == {
        "CUDA_VISIBLE_DEVICES": "",
        "NVIDIA_VISIBLE_DEVICES": "void",
    }


@pytest.mark.parametrize("role", ["policy", "rollout"])
@pytest.mark.parametrize("version", ["2.6.0", "2.9.1", "2.13.0+cpu", "3.0.0a0+git1234"])
def test_gpu_roles_start_with_classic_segments_in_any_torch_version(role: Role, version: str) -> None:
    assert allocator_environment(role, version) == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}


@pytest.mark.parametrize(
    ("version", "said"), [("2.5.1", "expected torch 2.6"), ("nightly", "expected a torch version")]
)
def test_a_torch_that_is_too_old_or_unknown_is_refused(version: str, said: str) -> None:
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


def test_the_release_of_a_version_is_its_first_two_numbers() -> None:
    assert torch_release("2.13.0+cpu") == (2, 13)


def test_torch_understands_the_setting() -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        pytest.skip("torch before 2.10 reads allocator settings only where there is a GPU")
    (setting,) = allocator_environment("policy", torch.__version__).values()
    torch._C._accelerator_setAllocatorSettings(setting)
    with pytest.raises((ValueError, RuntimeError)):
        torch._C._accelerator_setAllocatorSettings(setting.lower())
