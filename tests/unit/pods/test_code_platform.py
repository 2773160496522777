"""The key of compiled code: equal where the code runs, different where it may not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_trainer.pods.code_platform import CodePlatform, flags_digest, this_platform

PLATFORM = CodePlatform(
    machine="x86_64",
    cpu_flags="a1",
    gpus=("NVIDIA H200 9.0",),
    versions=("python 3.11.9", "torch 2.11.0+cu129", "triton 3.6.0", "vllm 0.26.0"),
)


@pytest.mark.parametrize(
    "changes",
    [
        {"machine": "aarch64"},
        {"cpu_flags": "a2"},
        {"gpus": ("NVIDIA H100 80GB HBM3 9.0",)},
        {"gpus": ()},
        {"versions": ("python 3.11.9", "torch 2.13.0+cu129", "triton 3.6.0", "vllm 0.26.0")},
    ],
)
def test_anything_that_code_depends_on_changes_the_key(changes: dict[str, object]) -> None:
    assert replace(PLATFORM, **changes).key != PLATFORM.key  # type: ignore[arg-type]
    assert replace(PLATFORM).key == PLATFORM.key


def test_the_flags_of_a_cpu_count_and_not_its_cores_or_their_order() -> None:
    one = "processor\t: 0\ncpu MHz\t\t: 2400.1\nflags\t\t: fpu avx2 avx512f\n"
    two = one + "processor\t: 1\ncpu MHz\t\t: 800.0\nflags\t\t: avx2 fpu avx512f\n"
    assert flags_digest(one) == flags_digest(two)
    assert flags_digest(one) != flags_digest(one.replace(" avx512f", ""))
    assert flags_digest("Features\t: fp asimd sve\n") != flags_digest("Features\t: fp asimd\n")


def test_this_machine_has_a_platform() -> None:
    here = this_platform()
    assert here == this_platform()
    assert here.cpu_flags != flags_digest(""), "/proc/cpuinfo lists the CPU's instructions"
    assert {version.partition(" ")[0] for version in here.versions} >= {"python", "torch"}
