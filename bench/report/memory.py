"""The page docs/mitigations.md: prose by hand, tables from the recorded results of the memory programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from bench.harness.record import RESULTS

Result = dict[str, Any]
Row = dict[str, Any]

GIB, MIB = 2**30, 2**20


def page() -> str:
    tables = "".join(_if_recorded(name, table) for name, table in _TABLES.items())
    return f"{_INTRODUCTION}{tables}{_SECTIONS}"


def _if_recorded(name: str, table: Callable[[Result], str]) -> str:
    path = RESULTS / f"{name}.json"
    return table(json.loads(path.read_text())) if path.is_file() else ""


_INTRODUCTION = """# Memory mitigations

Made from `bench/results/memory_*.json` by `bench/report/pages.py`; edit `bench/report/memory.py`.

Policy and engine share a GPU in turn. Each of the settings below keeps one of them out of the other's memory; all are
fields of `spec.memory`. `Auto`, the default, leaves a setting to the memory plan, which a failure may change; a value
pins it. The table in `trainer/rljob_trainer/policy/memory_mitigations/__init__.py` says where
each is in the code.
"""


# --- tables ---


def _costs(result: Result) -> str:
    arms = _arms(result)
    # The first arm of a process is slower than the same plan later on: the others are compared with the second run.
    default, generation = arms["default plan, again"], arms["generation"].get("generate_seconds", 0.0)
    whole_step = generation + default["without_generation_seconds"]
    measured = [name for name, row in arms.items() if "update_seconds" in row and row is not default]
    names = {name: "nothing, first run" if name == "default plan" else name for name in measured}
    lines = [_cost_line(arms[name], names[name], default, whole_step) for name in measured]
    return f"""
## What each costs and frees

`{result["script"]}`, {result["date"]}, {result["device"]}: {result["note"]}. A step of the default plan takes
{whole_step:.2f} s, {generation:.2f} s of it generation. Each line is the default plan with one setting changed. The
default plan ran twice: its first run, the first arm of the process, is slower than all that follow. A percent or two is
noise.

| changed | ms a step | % | allocated at most | reserved at most | reserved after the sync |
|---|---|---|---|---|---|
| nothing | {1000 * whole_step:.0f} | | {_memory(default)} |
{_lines(lines)}
{_failures(arms.values())}"""


def _cost_line(row: Row, name: str, default: Row, whole_step: float) -> str:
    seconds = row["without_generation_seconds"] - default["without_generation_seconds"]
    return f"| {name} | {1000 * seconds:+.0f} | {100 * seconds / whole_step:+.1f} | {_memory(row)} |"


def _memory(row: Row) -> str:
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "reserved_after_sync_bytes")
    return " | ".join(_gib(row[name]) for name in names)


def _cache(result: Result) -> str:
    lines = [
        f"| {row['arm']} | {_gib(row['peak_allocated_bytes'])} | {_gib(row['steps'][0]['peak_reserved_bytes'])} → "
        f"{_gib(row['peak_reserved_bytes'])} | {row['reserved_by_allocated']:.2f} | "
        f"{_gib(max(step['reserved_after_bytes'] for step in row['steps']))} |"
        for row in result["rows"]
        if row.get("steps") and "peak_allocated_bytes" in row
    ]
    return f"""
## Cached memory over steps of mixed lengths

`{result["script"]}`, {result["date"]}, {result["device"]}: {result["note"]}.

| on | allocated at most | reserved at most, first step → all steps | by allocated | held after the update, at most |
|---|---|---|---|---|
{_lines(lines)}

`uneven`: the budget of tokens differs from step to step. Micro-batches by token budget keep requests alike, so that
reserved memory hardly grows here even without either setting; but without the flush all of it stays with the policy,
and the engine cannot have it.
{_failures(result["rows"])}"""


def _retained(result: Result) -> str:
    lines = [
        f"| {row['arm']} | {row['micro_batches']:,} | {row['growth_bytes_per_micro_batch'] / MIB:+.2f} MiB | "
        f"{row['growth_bytes'] / MIB:+,.1f} MiB | {row['milliseconds_per_micro_batch']:.1f} |"
        for row in result["rows"]
        if "growth_bytes" in row
    ]
    return f"""
## Memory kept by what is logged

`{result["script"]}`, {result["date"]}, {result["device"]}: {result["note"]}.

| metrics | micro-batches | allocated, each | over all | ms each |
|---|---|---|---|---|
{_lines(lines)}
{_failures(result["rows"])}"""


def _small_card(result: Result) -> str:
    lines = [
        f"| {row['arm']} | {_card(row)} | {row['steps_survived']} | {_most(row, 'cached_after_update_bytes')} | "
        f"{_most(row, 'cached_after_sync_bytes')} | {_most(row, 'sync_peak_reserved_bytes')} | "
        f"{1000 * row.get('sync_seconds_median', 0):.0f} |"
        for row in result["rows"]
        if "steps_survived" in row
    ]
    return f"""
## On a small card

`{result["script"]}`, {result["date"]}, {result["device"]}: {result["note"]}.
Cached: reserved and not allocated by the policy.

| arm | card | steps survived | cached after an update | cached after a sync | reserved in a sync | ms a sync |
|---|---|---|---|---|---|---|
{_lines(lines)}
{_failures(result["rows"])}"""


def _controller(result: Result) -> str:
    lines = [
        f"| {row['arm']} | {row['device_bytes'] / MIB:.0f} MiB |" for row in result["rows"] if "device_bytes" in row
    ]
    return f"""
## What a controller takes of GPU 0

`{result["script"]}`, {result["date"]}, {result["device"]}. Beside our controller, programs that call
`torch.cuda.synchronize()` once, and that multiply two matrices once.

| program | GPU memory |
|---|---|
{_lines(lines)}
{_failures(result["rows"])}"""


def _rollout_role(result: Result) -> str:
    lines = [
        f"| {row['arm']} | {_gib(row['awake_bytes'])} | {_gib(row['asleep_bytes'])} |"
        for row in result["rows"]
        if "awake_bytes" in row
    ]
    return f"""
## What a rollout process holds

`{result["script"]}`, {result["date"]}, {result["device"]}: {result["note"]}.

| in the process | awake | asleep |
|---|---|---|
{_lines(lines)}
{_failures(result["rows"])}"""


_TABLES: dict[str, Callable[[Result], str]] = {
    "memory_mitigation_cost": _costs,
    "memory_cache": _cache,
    "memory_retained": _retained,
    "memory_small_card": _small_card,
    "memory_controller": _controller,
    "memory_rollout_role": _rollout_role,
}


def _arms(result: Result) -> dict[str, Row]:
    return {row["arm"]: row for row in result["rows"]}


def _failures(rows: Iterable[Row]) -> str:
    """A line for each arm that failed, with the beginning of its error."""
    return "".join(
        f"\n`{row['arm']}` ended with: {' '.join(row['error'].split())[:300]}\n" for row in rows if "error" in row
    )


def _most(row: Row, name: str) -> str:
    return _gib(max((step[name] for step in row["steps"]), default=0))


def _card(row: Row) -> str:
    return _gib(row["card_bytes"]) if "card_bytes" in row else "whole"


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


_SECTIONS = """
## emptyCache

Gives cached GPU memory back when an update, a log-probability pass, a checkpoint, a sync or an export has ended, failed
or not, and before anything else needs the GPU. Less than 64 MiB stays cached, and it is never done between
micro-batches.

- When: policy and engine share a GPU. The engine takes its memory behind torch's back: what the policy caches is not
  free for it, and the engine is the one that fails, in waking up.
- Costs: the device is waited for, and the next update asks for its memory again.
- Frees: all that the policy holds beyond its weights and its optimizer.
- Pin it: `emptyCache: Enabled` or `Disabled`. `Auto`: enabled where the GPU is shared.

## expandableSegments

Lets the policy's allocator grow segments in place, so that sequences of ever other lengths leave no gaps which nothing
fits into. Switched on when the policy's model is built; the engine never uses them.

- When: `reserved but unallocated` is large in an out-of-memory error, or grows over steps.
- Costs: nothing that the table above shows. From torch 2.11 on, pages are 256 MiB large instead of 20, so that few are
  taken away and mapped again in each step.
- Frees: the gaps.
- Pin it: `expandableSegments: Enabled` or `Disabled`. `Auto`: enabled on GPUs.

## weightExport

The engine on the same GPU reads the weights through CUDA IPC, and memory of expandable segments can only be exported
with privileges that a container does not have. So weights are packed in classic memory: `SwitchSegments` turns
expandable segments off for the time of the sync, makes a buffer for each bucket, gives it back, and turns them on
again, also where the sync fails. `ReservedBuffer` makes one buffer before they are on, and keeps it.

- When: `ReservedBuffer` where torch refuses to switch (the error says so), or where the sync's flush of the cache costs
  more than a buffer. Neither touches a sync through shared memory on CPUs, or a checkpoint.
- Costs: `SwitchSegments` a flush of the cache before and after each sync, `ReservedBuffer` a buffer of
  `syncBucketSize` (or of the largest parameter) for good.
- Pin it: `weightExport: SwitchSegments` or `ReservedBuffer`.

## detachMetrics

What is logged of a micro-batch is cut from its autograd graph at the one place where metrics are kept, which refuses
tensors with gradient; the micro-batch itself is dropped after its backward pass.

- When: always. `Disabled` keeps each graph on purpose, to show what that costs.
- Costs: nothing.
- Frees: the activations of all micro-batches of an update but one.
- Pin it: `detachMetrics: Enabled` or `Disabled`.

## rolloutSleep

vLLM's sleep mode while the policy learns. `Level2` drops weights and KV cache: the next sync brings the weights.
`Level1` keeps the weights in host memory.

- When: policy and engine share a GPU. An engine on a GPU of its own does not sleep: it has nobody to make room for, and
  there telling it to sleep or to wake does nothing. It holds no policy module and no optimizer either.
- Costs: going to sleep and waking in two parts.
- Frees: weights and KV cache of the engine; what stays is its CUDA context and CUDA graphs. `Level1` takes pinned host
  memory of the size of the weights.
- Pin it: `rolloutSleep: Level2`, `Level1` or `Disabled`. `Auto`: `Level2` where the GPU is shared.

## kvCache

The KV cache's size in bytes, instead of a share of whatever was free when the engine started.

- When: the engine cannot wake, or cannot start. A smaller one generates fewer sequences at a time.
- Costs: time of generation, where the step's sequences no longer fit at once.
- Frees: exactly what it is made smaller by.
- Pin it: `kvCache: 6Gi`.

## microBatchTokens

Tokens, padding included, in one forward and backward pass.

- When: memory runs out in an update, with much allocated and little cached.
- Costs: time of the update, more the less a micro-batch fills the GPU.
- Frees: activations, in proportion.
- Pin it: `microBatchTokens: 8192`; at least the longest sequence is needed.

## logprobChunkTokens

Tokens whose logits over the vocabulary exist at a time, as float32.

- When: a vocabulary of hundreds of thousands meets a small GPU.
- Costs: time of the update: more and smaller products with the head.
- Frees: 8 bytes × vocabulary for each token less, as long as logits are what an update needs most of: its logits, and
  their gradient of two chunks in 16 bits. Layers that are not compiled take 27.
- Pin it: `logprobChunkTokens: 128`.

## activationCheckpointing

Of each layer only the input is kept for backward; the layer runs again there.

- When: one sequence does not go through otherwise, or micro-batches have become small.
- Costs: a second forward pass: the table says what that was.
- Frees: most of the activations.
- Pin it: `activationCheckpointing: Enabled` or `Disabled`.

## optimizerOffload

AdamW's moments lie in host memory between updates.

- When: policy and engine together do not fit although the engine sleeps, or the engine's KV cache has no room.
- Costs: 8 bytes a parameter over PCIe, twice a step, and as much host memory.
- Frees: 8 bytes a parameter, divided by the number of ranks, while the engine generates.
- Pin it: `optimizerOffload: Enabled` or `Disabled`.

## syncBucketSize

Weights that are packed and sent at once; a larger parameter goes alone.

- When: memory runs out in a sync.
- Costs: a call to the engine for each bucket.
- Frees: twice the difference: the bucket and its packed copy.
- Pin it: `syncBucketSize: 128Mi`.

## What needs no setting

- The controller makes no CUDA context: it imports no torch, sees no GPU (`CUDA_VISIBLE_DEVICES` is empty), counts GPUs
  through NVML, and no tensor of a GPU ever comes its way.
- The optimizer's state is made when the policy loads, before the engine takes its KV cache: it cannot come as a
  surprise in the first step.
- An update that runs out of memory before it has written a parameter leaves a single rank as it was, and can be run
  again.
"""
