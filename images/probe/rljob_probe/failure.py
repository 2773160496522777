"""Recognition of exceptions that mean that memory ran out, and of the kind of memory."""

from __future__ import annotations

import re
from typing import Iterator, NamedTuple

DEVICE, HOST, SHARED = 80, 81, 82
"""RLJob's exit codes for out of memory on a GPU, on the host or in the container, and in /dev/shm."""

_LONGEST_CHAIN = 64
_RAY_ERRORS = ("RayTaskError", "RayActorError")
_LONGEST_TEXT = 8192

# Messages of torch, vLLM, NCCL, cuBLAS, CUDA, glibc, Ray and numpy; the operator's diagnosis distinguishes more.
_TEXTS = (
    (SHARED, r"No space left on device[^\n]{0,80}/dev/shm|/dev/shm[^\n]{0,200}No space left on device"),
    (SHARED, r"unable to (?:write to file|open shared memory|allocate shared memory)[^\n]{0,30}</torch_"),
    (SHARED, r"out of shared memory|insufficient shared memory \(shm\)"),
    (DEVICE, r"(?:CUDA|HIP|XPU|NPU) out of memory"),
    (DEVICE, r"(?:CUDA|HIP|cuda|hip)(?: driver| runtime)? [Ee]rror(?: \(2\))?:? ?:? out of memory"),
    (DEVICE, r"(?:CUDA|Cuda|HIP) failure (?:\d+ )?'out of memory'"),
    (DEVICE, r"CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory|cudaErrorMemoryAllocation"),
    (DEVICE, r"(?:CUBLAS|CUDNN|HIPBLAS)_STATUS_ALLOC_FAILED"),
    (DEVICE, r"RESOURCE_EXHAUSTED: Out of memory"),
    # vLLM and SGLang, which refuse to start.
    (DEVICE, r"Free memory on device .{0,60}on startup is less than (?:desired GPU memory|the engine's budget)"),
    (DEVICE, r"Externally held weights on device .{0,60}exceed the desired GPU memory utilization"),
    (DEVICE, r"No available memory for the cache blocks|GiB KV cache is needed, which is larger than the available"),
    (DEVICE, r"larger than the maximum number of tokens that can be stored in KV cache|Error in memory profiling"),
    (DEVICE, r"[Tt]ry (?:to )?increas(?:e|ing) --mem-fraction-static"),
    (DEVICE, r"\btorch\.(?:cuda\.)?OutOfMemoryError\b"),
    (HOST, r"DefaultCPUAllocator: (?:can't allocate|not enough) memory"),
    (HOST, r"\bstd::bad_alloc\b|\[Errno 12\] Cannot allocate memory|\bMemoryError\b"),
    (HOST, r"ray\.exceptions\.OutOfMemoryError|due to the node running low on memory"),
)


class RecognizedFailure(NamedTuple):
    exit_code: int
    """DEVICE, HOST or SHARED."""
    text: str
    """Type and message of the error, from the line about memory."""
    error: BaseException


def memory_failure(error: BaseException | None) -> RecognizedFailure | None:
    """The earliest out-of-memory error among `error` and its causes; None if there is none."""
    found = [failure for link in _chain(error) if (failure := _failure_of(link)) is not None]
    return found[-1] if found else None


def is_of_another_process(error: BaseException | None) -> bool:
    """True if Ray has brought the error here: its process knows more about it."""
    return any(class_.__name__ in _RAY_ERRORS for link in _chain(error) for class_ in type(link).__mro__)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """`error`, its causes, and the members of exception groups: each once, latest first."""
    waiting = [error] if error is not None else []
    seen: set[int] = set()
    while waiting and len(seen) < _LONGEST_CHAIN:
        link = waiting.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        members = getattr(link, "exceptions", ())
        waiting += [member for member in members if isinstance(member, BaseException)]
        # `cause`: in Ray's RayTaskError, the error of the task, whose own text is a long traceback.
        causes = (getattr(link, "cause", None), link.__cause__, link.__context__)
        waiting += [cause for cause in causes if isinstance(cause, BaseException)]


def _failure_of(error: BaseException) -> RecognizedFailure | None:
    text = _text_of(error)
    exit_code = _exit_code_of_type(type(error))
    if exit_code is not None:
        return RecognizedFailure(exit_code, text, error)
    matches = ((exit_code, re.search(pattern, text)) for exit_code, pattern in _TEXTS)
    for exit_code, match in matches:
        if match is not None:
            line_start = text.rfind("\n", 0, match.start()) + 1
            return RecognizedFailure(exit_code, text[line_start:], error)
    return None


def _exit_code_of_type(type_: type[BaseException]) -> int | None:
    """Exit code for a class of exceptions. The classes of torch, cupy and Ray share a name, so the module decides; that
    of cupy is also a MemoryError."""
    for class_ in type_.__mro__:
        if class_.__name__ == "OutOfMemoryError":
            return HOST if class_.__module__.startswith("ray") else DEVICE
    return HOST if issubclass(type_, MemoryError) else None


def _text_of(error: BaseException) -> str:
    type_ = type(error)
    name = type_.__qualname__ if type_.__module__ == "builtins" else f"{type_.__module__}.{type_.__qualname__}"
    try:
        message = str(error)
    except Exception:
        message = ""
    return f"{name}: {message}"[:_LONGEST_TEXT] if message else name
