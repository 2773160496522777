"""Memory that stays from step to step on one GPU: in a sleeping engine, in the policy's cache, after checkpoints.

    python -m bench.programs.kept_memory [ARM...] [--smoke]

Arms (Qwen3-0.6B's shape, random weights, 128 responses of 256 tokens a step, a checkpoint after each step):
    plain          the default plan
    reference      the same with a KL term, whose reference pass runs before each micro-batch
    no-ptrace      the same as plain, in processes whose pidfd_getfd and ptrace fail with EPERM, as in most containers
    export         under the same restriction, export a tensor in expandable segments to another process (CUDA IPC)
    leak           the engine's process keeps 6 GiB of GPU memory more after each sleep
    leak-disabled  the same with memory.mode: Disabled, so that the engine is not replaced
    leak-policy    a policy keeps 200 MiB more with each update, on a card of 24 GiB with room for some 20 such steps
    leak-rollout   the same for an engine with each rollout

Records one row per arm in `bench/results/kept_memory.json`. `--smoke` runs `plain`, or the given arms, with a tiny
model on any device, and records nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from bench.harness.record import RESULTS, record_row, require_gpus
from bench.harness.run_arms import ledger_of, pinned_to_a_card, write_job
from bench.harness.samplers import device_used_bytes
from rljob_client.run_directory.memory_logs import logged_samples
from rljob_memory.sample import MemorySample
from rljob_memory.sizes import GIB
from rljob_testing.ballast import CudaDriver, ballast
from rljob_testing.plan_accuracy.jobs import generating_job
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.roles.rollout_actor import ColocatedRolloutActor

NAME = "kept_memory"
ARMS = ("plain", "reference", "no-ptrace", "export", "leak", "leak-disabled", "leak-policy", "leak-rollout")
STEPS = {"leak": 30, "leak-disabled": 30, "leak-policy": 60, "leak-rollout": 60}
DEFAULT_STEPS = 12
PHASES_OF_LEAKS = {"leak-policy": "update", "leak-rollout": "rollout"}
CARD_BYTES, ROOM_BYTES = 24 * GIB, 4 * GIB
"""The plan is that for the card, and the ballast leaves the room for the leak beside it."""
LEAKED_BYTES = 6 * GIB
"""Per sleep. An H100 of 80 GB is full after some ten steps, an H200 after twenty."""


class LeakingEngine(ColocatedRolloutActor):
    """An engine whose process keeps more of the GPU after each sleep, where torch does not count it."""

    def sleep(self) -> None:
        super().sleep()
        CudaDriver().allocate(LEAKED_BYTES)


def main(arms: list[str], smoke: bool, output: Path, results: Path) -> None:
    if not smoke:
        require_gpus(1)
    for arm in arms or (["plain"] if smoke else ARMS):
        row = exported() if arm == "export" else trained(arm, smoke, output / arm)
        print(json.dumps(row), flush=True)
        if smoke:
            assert row["exit_code"] == 0
            continue
        note = "Qwen3-0.6B shape, random weights, 128 responses of 256 tokens and a checkpoint a step"
        print(record_row(NAME, row, "arm", note, results), flush=True)


def trained(arm: str, smoke: bool, output: Path) -> dict[str, Any]:
    shutil.rmtree(output, ignore_errors=True)
    spec = spec_of(arm, smoke)
    resolve_model(spec["model"]["uri"])
    path = write_job(output.parent, arm, spec)
    program = ["-c", LEAKING] if arm in ("leak", "leak-disabled") else ["-m", "rljob_client"]
    before = without_ptrace if arm == "no-ptrace" else None
    room = CARD_BYTES + ROOM_BYTES - device_used_bytes() if arm in PHASES_OF_LEAKS and not smoke else 0
    with ballast(leave_bytes=room) if room else nullcontext():
        done = subprocess.run(
            [sys.executable, *program, "run", path, "--output", output], check=False, preexec_fn=before, timeout=900
        )
    return {"arm": arm, "exit_code": done.returncode, **measured(output)}


LEAKING = f"""
from rljob_trainer.roles.topologies import ColocatedRoles
ColocatedRoles.engine_class = "{__spec__.name if __spec__ else __name__}:{LeakingEngine.__name__}"
from rljob_client.__main__ import main
main()
"""


def spec_of(arm: str, smoke: bool) -> dict[str, Any]:
    steps = 3 if smoke else STEPS.get(arm, DEFAULT_STEPS)
    spec = generating_job("0.6b", steps, 16, response_tokens=256, smoke=smoke)
    spec["algorithm"]["klCoefficient"] = 0.05 if arm == "reference" else 0.0
    memory: dict[str, Any] = {"mode": "Disabled" if arm == "leak-disabled" else "Auto"}
    if phase := PHASES_OF_LEAKS.get(arm):
        memory |= {} if smoke else pinned_to_a_card(spec, CARD_BYTES)
        leak = {"class": "Leak", "phase": phase, "step": 1, "times": steps}
        spec["faultInjection"] = {"enabled": True, "faults": [leak]}
    return spec | {
        "memory": memory,
        "recovery": {"maxRestarts": 0},
        "checkpoint": {"everySteps": 1000 if arm.startswith("leak") else 1, "keep": 1},
    }


def measured(output: Path) -> dict[str, Any]:
    """Bytes by step of the memory that stays, and the changes of the plan."""
    lines = ledger_of(output)
    steps = [line for line in lines if line["kind"] == "step"]
    samples = [(actor, each) for actor, each in logged_samples(output / "memory") if each.micro_batch is None]

    def by_step(actor: str, phase: str, of: Callable[[MemorySample], int]) -> list[int]:
        return [of(each) for name, each in samples if (name, each.phase) == (actor, phase)]

    summary = json.loads((output / "summary.json").read_text()) if (output / "summary.json").exists() else {}
    return {
        "steps": len(steps),
        "exit_reason": summary.get("exit_reason"),
        "seconds": [step["total_seconds"] for step in steps],
        "asleep_engine_bytes": [step["metrics"].get("asleep_engine_bytes") for step in steps],
        "replayed_steps": sum(line.get("replayed_steps", 0) for line in lines if line["kind"] == "restore"),
        "policy_tensors_after_update_bytes": by_step("policy-0", "update", lambda s: s.allocated_bytes),
        "policy_peak_allocated_in_update_bytes": by_step("policy-0", "update", lambda s: s.peak_allocated_bytes),
        "policy_cache_after_update_bytes": by_step("policy-0", "update", lambda s: s.cache_bytes or 0),
        "policy_cache_after_sync_bytes": by_step("policy-0", "sync", lambda s: s.cache_bytes or 0),
        "policy_rss_after_checkpoint_bytes": by_step("policy-0", "checkpoint", lambda s: s.rss_bytes),
        "policy_gpu_after_checkpoint_bytes": by_step("policy-0", "checkpoint", lambda s: s.held_bytes),
        "engine_rss_after_rollout_bytes": by_step("rollout-0", "rollout", lambda s: s.rss_bytes),
        "plan_changes": [line["change"] for line in lines if line["kind"] == "plan_change"],
    }


# --- a container without ptrace ---

_PIDFD_GETFD, _PTRACE = 438, 101
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def without_ptrace() -> None:
    """Let pidfd_getfd and ptrace fail with EPERM in this process (x86-64) and in all that it starts."""
    code = [
        (_LOAD, 0, 0, 0),  # the number of the system call
        (_JUMP_IF_EQUAL, 1, 0, _PIDFD_GETFD),
        (_JUMP_IF_EQUAL, 0, 1, _PTRACE),
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(code), packed)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "prctl")


EXPORT = """
import sys, torch, torch.multiprocessing as processes
def read(queue):
    try:
        print("read", float(queue.get()[0]), flush=True)
    except BaseException as error:
        print("refused:", type(error).__name__, str(error).splitlines()[0], flush=True)
if __name__ == "__main__":
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    start = processes.get_context("spawn")
    queue = start.Queue()
    reader = start.Process(target=read, args=(queue,))
    reader.start()
    tensor = torch.ones(1 << 24, device="cuda")
    queue.put(tensor)
    reader.join(60)
    reader.kill()
"""


def exported() -> dict[str, Any]:
    """The answers of a process that opens a tensor in expandable segments, with and without the restriction."""
    script = Path("/tmp/kept_memory_export.py")
    script.write_text(EXPORT)
    answers: Mapping[str, Callable[[], None] | None] = {"permitted": None, "restricted": without_ptrace}
    return {"arm": "export"} | {
        name: subprocess.run(
            [sys.executable, script], check=False, preexec_fn=before, capture_output=True, text=True, timeout=180
        ).stdout.strip()
        for name, before in answers.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="*", choices=[*ARMS, []], metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--smoke", action="store_true", help="a tiny model; records nothing")
    parser.add_argument("--output", type=Path, default=Path("runs") / NAME, help="of the runs (replaced)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    main(**vars(parser.parse_args()))
