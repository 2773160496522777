"""Machines: memory, speed and links of the types of GPUs, and what the budget knows of a job's own machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rljob_memory.sizes import GIB

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class GpuType:
    """One type of GPU, by its data sheet. Rates are in one direction, in bytes per second."""

    name: str
    memory_bytes: int
    """Memory as CUDA reports it."""
    bfloat16_flops: float
    """Dense bfloat16 operations per second."""
    memory_rate: float
    pcie_rate: float
    """Bytes per second between the GPU and host memory."""
    link_rate: float
    """Bytes per second between two GPUs of a machine: NVLink, or PCIe."""


_PCIE_4, _PCIE_5 = 32e9, 64e9

GPU_TYPES = {
    each.name: each
    for each in (
        GpuType("b200", int(178.4 * GIB), 2250e12, 8.0e12, _PCIE_5, 900e9),
        GpuType("h200", int(139.8 * GIB), 989e12, 4.8e12, _PCIE_5, 450e9),
        GpuType("h100", int(79.1 * GIB), 989e12, 3.35e12, _PCIE_5, 450e9),
        GpuType("h100-nvl", int(93.1 * GIB), 835e12, 3.9e12, _PCIE_5, 300e9),
        GpuType("h20", int(95.1 * GIB), 148e12, 4.0e12, _PCIE_5, 450e9),
        GpuType("a100-80", int(79.2 * GIB), 312e12, 2.04e12, _PCIE_4, 300e9),
        GpuType("a100-40", int(39.4 * GIB), 312e12, 1.56e12, _PCIE_4, 300e9),
        GpuType("l40s", int(44.4 * GIB), 362e12, 0.86e12, _PCIE_4, _PCIE_4),
        GpuType("a6000", int(47.4 * GIB), 155e12, 0.77e12, _PCIE_4, _PCIE_4),
        GpuType("rtx4090", int(23.5 * GIB), 165e12, 1.01e12, _PCIE_4, _PCIE_4),
        GpuType("a10g", int(22.1 * GIB), 70e12, 0.6e12, _PCIE_4, _PCIE_4),
        GpuType("l4", int(22.0 * GIB), 121e12, 0.3e12, _PCIE_4, _PCIE_4),
    )
}
"""Types of GPUs by the name that `rljob plan --gpu` takes."""

CPU = GpuType("cpu", 0, 1e12, 5e10, 1e10, 1e10)
"""Processes on a CPU, only to compare plans."""

_PRODUCT_NAMES = {
    "B200": "b200",
    "H200": "h200",
    "H100 NVL": "h100-nvl",
    "H100": "h100",
    "H20": "h20",
    "A100-SXM4-40GB": "a100-40",
    "A100-PCIE-40GB": "a100-40",
    "A100": "a100-80",
    "L40S": "l40s",
    "RTX A6000": "a6000",
    "RTX 4090": "rtx4090",
    "A10G": "a10g",
    "L4": "l4",
}
"""Types by a part of the name that NVML and the label `nvidia.com/gpu.product` have; the first that matches."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machine of a job's processes."""

    device: DeviceKind
    device_memory_bytes: int
    """Memory of one GPU of the policy; 0 on a CPU."""
    host_memory_bytes: int
    """Host memory that the job may use, on all machines together."""
    engine_device_memory_bytes: int = 0
    """Memory of one GPU of the engines, if it differs from the policy's; 0: it does not."""
    gpu: str = ""
    """Product name of the GPU, or a name in `GPU_TYPES`; empty: unknown."""
    shared_memory_bytes: int = 0
    """Size of /dev/shm of a worker; 0: unknown."""
    layers_compiled: bool = False
    """The policy's layers are compiled, as on GPUs unless the environment disables it."""

    @property
    def gpu_type(self) -> GpuType:
        """The type by the GPU's name, else the one whose memory is closest."""
        if self.device == "cpu":
            return CPU
        name = self.gpu if self.gpu in GPU_TYPES else type_of_product(self.gpu)
        if name is not None:
            return GPU_TYPES[name]
        return min(GPU_TYPES.values(), key=lambda each: abs(each.memory_bytes - self.device_memory_bytes))


def type_of_product(product: str) -> str | None:
    """Name of the type of GPU with this product name, such as `NVIDIA H100 80GB HBM3`; None if it is unknown."""
    if "MIG" in product:
        return None  # a part of a GPU
    comparable = product.replace("-", " ")
    return next((name for part, name in _PRODUCT_NAMES.items() if part.replace("-", " ") in comparable), None)


def gpu_name(product: str) -> str:
    """Name of the type of GPU with this product name; the product name itself if the type is unknown."""
    return type_of_product(product) or product


HOST_BYTES_PER_GPU = 256 * GIB
"""Host memory of a machine that is not known: eight GPUs often share 2 TiB."""

ASSUMED: dict[DeviceKind, Hardware] = {
    "cuda": Hardware("cuda", 80 * GIB, 2048 * GIB, layers_compiled=True),
    "cpu": Hardware("cpu", 0, 16 * GIB),
}
"""Machines of a prediction, as long as the job's own is not known."""
