"""The state of torch's allocator when a request failed, as its process recorded it: small, JSON, one file per failure.

The trainer's processes write `oom/<role>-<rank>-step<k>.json`; any other program can write the same form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from rljob_memory.evidence.activity import activity_of
from rljob_memory.evidence.failure import DeviceMemory, Failure, FailureKind
from rljob_memory.sample import current_name
from rljob_memory.sizes import human_bytes

MOST_SEGMENTS = 20
MOST_BLOCKS = 50
MOST_STACK_LINES = 80


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Segment(_Part):
    """One piece of memory that the allocator holds."""

    size_bytes: int = Field(ge=0)
    allocated_bytes: int = Field(ge=0)

    largest_free_bytes: int = Field(default=0, ge=0)
    """Size of the largest free block in it."""

    blocks: int = Field(default=0, ge=0)
    expandable: bool = False


class Layout(_Part):
    """Layout of the allocator's memory: its largest segments, and the sizes of the largest blocks in use."""

    segment_count: int = Field(default=0, ge=0)
    free_block_count: int = Field(default=0, ge=0)
    largest_free_block_bytes: int = Field(default=0, ge=0)
    segments: list[Segment] = Field(default_factory=list, max_length=MOST_SEGMENTS)
    largest_blocks_bytes: list[int] = Field(default_factory=list, max_length=MOST_BLOCKS)


def _with_current_names(counters: object) -> object:
    if not isinstance(counters, dict):
        return counters
    return {current_name(name) if isinstance(name, str) else name: value for name, value in counters.items()}


class OomSnapshot(_Part):
    """One failed request."""

    kind: Literal["out_of_memory"] = "out_of_memory"
    time: float
    """Seconds since the epoch."""

    role: str
    rank: int = Field(ge=0)
    step: int = Field(default=0, ge=0)
    phase: str | None = None
    micro_batch: int | None = None
    """Micro-batches of the phase that were done."""

    gpu: int = Field(ge=0)
    requested_bytes: int = Field(ge=0)
    allowed_bytes: int = Field(default=0, ge=0)
    """The device's memory, or the cap that was set on the process."""

    device_free_bytes: int = Field(ge=0)
    device_total_bytes: int = Field(default=0, ge=0)
    counters: Annotated[dict[str, int], BeforeValidator(_with_current_names)] = {}
    """Counters of torch's allocator, by their names in the memory log."""

    layout: Layout | None = None
    """Absent if the allocator could not report it."""

    stack: list[str] = Field(default_factory=list, max_length=MOST_STACK_LINES)
    """`file in function` and the line of code of each frame, the outermost first."""

    versions: dict[str, str] = {}

    def device_memory(self) -> DeviceMemory:
        allocated, reserved = self.counters.get("allocated_bytes"), self.counters.get("reserved_bytes")
        return DeviceMemory(
            self.requested_bytes,
            gpu=self.gpu,
            total_bytes=self.device_total_bytes or None,
            free_bytes=self.device_free_bytes,
            allocated_bytes=allocated,
            cached_bytes=None if allocated is None or reserved is None else max(reserved - allocated, 0),
            allowed_bytes=self.allowed_bytes if 0 < self.allowed_bytes < self.device_total_bytes else None,
            largest_cached_block_bytes=self.layout.largest_free_block_bytes if self.layout else None,
        )

    def failure(self, source: str) -> Failure:
        """The snapshot as a failure. `source`: the file, for people."""
        return Failure(
            FailureKind.ALLOCATOR,
            text=f"torch's allocator could not serve a request of {human_bytes(self.requested_bytes)}",
            device=self.device_memory(),
            activity=activity_of(self.stack),
            role=self.role,
            rank=self.rank,
            step=self.step or None,
            phase=self.phase,
            micro_batch=self.micro_batch,
            clock=("epoch", self.time),
            source=source,
        )


def layout_of(snapshot: Mapping[str, Any]) -> Layout:
    """The layout in a snapshot of `torch.cuda.memory._snapshot()`, without values that a version of torch lacks."""
    segments = [_segment(segment) for segment in snapshot.get("segments", ())]
    blocks = [block for segment in snapshot.get("segments", ()) for block in segment.get("blocks", ())]
    in_use = sorted((int(block["size"]) for block in blocks if block["state"] != "inactive"), reverse=True)
    free = [int(block["size"]) for block in blocks if block["state"] == "inactive"]
    return Layout(
        segment_count=len(segments),
        free_block_count=len(free),
        largest_free_block_bytes=max(free, default=0),
        segments=sorted(segments, key=lambda segment: -segment.size_bytes)[:MOST_SEGMENTS],
        largest_blocks_bytes=in_use[:MOST_BLOCKS],
    )


def _segment(segment: Mapping[str, Any]) -> Segment:
    blocks = segment.get("blocks", ())
    return Segment(
        size_bytes=segment.get("total_size", 0),
        allocated_bytes=segment.get("allocated_size", 0),
        largest_free_bytes=max((block["size"] for block in blocks if block["state"] == "inactive"), default=0),
        blocks=len(blocks),
        expandable=bool(segment.get("is_expandable", False)),
    )
