"""Reads the account that the probe adds to a termination message: `rljob_probe.account` writes these lines."""

from __future__ import annotations

import re
from dataclasses import replace

from rljob_memory.evidence.collected import EvidenceBuilder
from rljob_memory.sample import MemorySample
from rljob_memory.sizes import GIB

MARK = "rljob-probe: "
_LARGEST_BLOCK = re.compile(r"largest free block (\d{1,15}) bytes")
_ENGINE = re.compile(r"engine in this process: KV cache (\d{1,15}) bytes, (awake|asleep)")
_OTHERS = re.compile(r"other processes with a GPU in this container: (.{1,500})")
_STEPS = re.compile(r"allocated/reserved GiB after steps: ([\d./ ]{1,2000})")
_PAIR = re.compile(r"(\d{1,6}\.\d\d)/(\d{1,6}\.\d\d)")
_MOST_SIBLINGS = 16


def note_probe_line(builder: EvidenceBuilder, text: str) -> bool:
    """Add the facts of a line of the probe to `builder`; False if it is not one."""
    if MARK not in text:
        return False
    if match := _LARGEST_BLOCK.search(text):
        builder.largest_free_block_bytes = int(match[1])
    elif match := _ENGINE.search(text):
        builder.engine = replace(
            builder.engine, seen=True, in_process=True, asleep=match[2] == "asleep", kv_cache_bytes=int(match[1])
        )
    elif match := _OTHERS.search(text):
        names = [name.strip() for name in match[1].split(",")]
        builder.siblings = () if names == ["none"] else tuple(names[:_MOST_SIBLINGS])
    elif match := _STEPS.search(text):
        for step, (allocated, reserved) in enumerate(_PAIR.findall(match[1])):
            sample = MemorySample(
                step=step,
                phase="update",
                allocated_bytes=round(float(allocated) * GIB),
                reserved_bytes=round(float(reserved) * GIB),
            )
            builder.add_sample("the process", sample)
    return True
