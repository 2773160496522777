"""A process that holds GPU memory and does nothing, so that others have less.

    python -m rljob_testing.ballast --hold BYTES | --leave BYTES

It uses the CUDA driver directly, so it starts quickly. It prints `ready` once it holds the memory, and ends when its
standard input is closed, so it never outlives its parent.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LARGEST_CHUNK_BYTES = 1 << 30
SMALLEST_CHUNK_BYTES = 2 << 20


class DriverError(Exception):
    """The message names the call and the driver's error."""


class CudaDriver:
    """The calls of libcuda that are needed to hold memory on GPU 0."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._call("cuCtxSetCurrent", self._context)

    def allocate(self, size_bytes: int) -> None:
        """Raises `DriverError`; it contains `CUDA_ERROR_OUT_OF_MEMORY` if the memory does not fit."""
        self._call("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(size_bytes))

    def free_bytes(self) -> int:
        """Free memory of the device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def _call(self, name: str, *arguments: object) -> None:
        if (status := getattr(self._library, name)(*arguments)) != 0:
            word = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(word))
            raise DriverError(f"{name} failed: {(word.value or b'?').decode()}")


@contextmanager
def ballast(*, hold_bytes: int = 0, leave_bytes: int = 0, gpu: int | None = None) -> Iterator[None]:
    """Within, another process holds `hold_bytes` of a GPU in addition to its CUDA context, or all but `leave_bytes`.

    `gpu`: its number among those of the machine, in NVML's order. None: the first that this process may use.
    """
    amount = ["--hold", str(hold_bytes)] if hold_bytes else ["--leave", str(leave_bytes)]
    command = [sys.executable, "-m", "rljob_testing.ballast", *amount]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment_for(gpu)
    ) as process:
        assert process.stdout is not None
        try:
            if process.stdout.readline().strip() != "ready":
                raise DriverError(f"no ballast ({' '.join(amount)}): is this much of the GPU free?")
            yield
        finally:
            process.kill()


def environment_for(gpu: int | None) -> dict[str, str]:
    """The environment of a process on this GPU of the machine, or on the one that this process may use."""
    chosen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
    return {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", **chosen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    amount = parser.add_mutually_exclusive_group(required=True)
    amount.add_argument("--hold", type=int, metavar="BYTES", help="hold this many bytes")
    amount.add_argument("--leave", type=int, metavar="BYTES", help="hold all but this many bytes")
    arguments = parser.parse_args()
    driver = CudaDriver()
    left_bytes = arguments.hold if arguments.leave is None else max(driver.free_bytes() - arguments.leave, 0)
    while left_bytes > 0:
        chunk_bytes = min(left_bytes, LARGEST_CHUNK_BYTES)
        driver.allocate(max(chunk_bytes, SMALLEST_CHUNK_BYTES))
        left_bytes -= chunk_bytes
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
