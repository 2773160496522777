from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_client.errors import BadInput
from rljob_trainer.hardware import this_machine, visible_gpus

GIB = 2**30
UUIDS = ["GPU-8f1c2b1e-1111-2222-3333-444455556666", "GPU-0f1c2b1e-1111-2222-3333-444455556666"]
MIG = "MIG-9c0d0a1b-aaaa-bbbb-cccc-ddddeeeeffff"
MEMORY = {UUIDS[0]: 80 * GIB, UUIDS[1]: 40 * GIB, MIG: 10 * GIB}


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def by_uuid(uuid: str) -> str:
        if uuid not in MEMORY:
            raise NVMLError
        return uuid

    nvml: Any = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: UUIDS[index],
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetUUID=lambda handle: handle,
        nvmlDeviceGetName=lambda handle: b"NVIDIA H200" if handle == UUIDS[0] else "NVIDIA A100",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=MEMORY[handle]),
        nvmlDeviceGetCudaComputeCapability=lambda handle: (9, 0) if handle == UUIDS[0] else (8, 0),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)


def test_names_are_text_with_every_version_of_the_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [gpu.name for gpu in visible_gpus()] == ["NVIDIA H200", "NVIDIA A100"]


@pytest.mark.parametrize(("visible", "capability"), [(None, (8, 0)), ("0", (9, 0)), ("", None)])
def test_the_capability_is_the_lowest_of_the_visible_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, capability: tuple[int, int] | None
) -> None:
    set_visible(monkeypatch, visible)
    assert this_machine().gpu_capability == capability


@pytest.mark.parametrize(
    ("visible", "gib"),
    [
        (None, (80, 40)),
        ("1", (40,)),
        ("1, 0", (40, 80)),
        (f"{UUIDS[1]},{UUIDS[0]}", (40, 80)),
        ("GPU-0f1c", (40,)),
        (MIG, (10,)),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", (80,)),
        ("NoDevFiles", ()),
    ],
)
def test_visible_gpus_are_found_by_every_name(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, gib: tuple[int, ...]
) -> None:
    set_visible(monkeypatch, visible)
    machine = this_machine()
    assert machine.gpu_memory_bytes == tuple(n * GIB for n in gib)
    assert machine.choose_device("auto") == ("cuda" if gib else "cpu")


@pytest.mark.parametrize("name", ["2", "cuda:0", "GPU-ffff", "GPU-", "MIG-ffff"])
def test_a_name_of_no_gpu_is_refused_unless_the_cpu_is_chosen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    set_visible(monkeypatch, name)
    with pytest.raises(BadInput, match=f"indices below 2.*found '{name}'.*nvidia-smi -L"):
        this_machine()
    assert this_machine(gpus=False).gpu_memory_bytes == ()


def set_visible(monkeypatch: pytest.MonkeyPatch, visible: str | None) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
