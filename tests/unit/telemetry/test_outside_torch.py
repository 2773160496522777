"""GPU memory of a process outside torch, with a fake NVML."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from rljob_trainer.telemetry.outside_torch import OutsideTorch


class NvmlError(Exception):
    pass


class Nvml:
    """`used`: memory of the GPU. `processes`: memory by process id, as NVML reports it."""

    NVMLError = NvmlError

    def __init__(self) -> None:
        self.used = 0
        self.processes: dict[int, int | None] = {}
        self.asked: list[str | int] = []

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        self.asked.append(index)
        return "gpu"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked.append(uuid)
        return "gpu"

    def nvmlDeviceGetMemoryInfo(self, _handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=self.used)

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes.items()]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    fake = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_nvml_is_asked_each_time_if_it_knows_the_process(nvml: Nvml) -> None:
    outside = OutsideTorch()
    nvml.processes = {os.getpid(): 1_500, 1: 40_000}
    assert outside.measure(1_000) == 500
    nvml.processes[os.getpid()] = 2_700
    assert outside.measure(2_000) == 700


@pytest.mark.parametrize("processes", [{4_000_001: 1_500}, {}, {os.getpid(): None}])
def test_in_a_container_it_is_the_growth_until_the_first_call(nvml: Nvml, processes: dict[int, int | None]) -> None:
    nvml.used, nvml.processes = 20_000, processes
    outside = OutsideTorch()
    nvml.used = 21_500
    assert outside.measure(1_000) == 500
    nvml.used = 60_000
    assert outside.measure(1_000) == 500, "what others take later is not this process's"


def test_a_foreign_process_with_the_same_id_is_not_counted(nvml: Nvml) -> None:
    """Process ids of the host and of the container can be equal."""
    outside = OutsideTorch()
    nvml.used, nvml.processes = 1_300, {os.getpid(): 200}
    assert outside.measure(1_000) == 300


@pytest.mark.parametrize(
    ("visible", "asked"), [(None, 0), ("3", 3), ("5,6", 5), ("GPU-1b2c", "GPU-1b2c"), (" 2 , 1", 2)]
)
def test_the_gpu_is_the_one_that_cuda_calls_0(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch, visible: str | None, asked: int | str
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    OutsideTorch()
    assert nvml.asked == [asked]


def test_without_a_driver_nothing_is_known(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise NvmlError

    monkeypatch.setattr(nvml, "nvmlInit", no_driver)
    assert OutsideTorch().measure(1_000) == 0
