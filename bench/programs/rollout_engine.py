"""Time of an engine's decoding step: with vLLM's code, with and without log-probabilities, and with the fast path.

    python -m bench.programs.rollout_engine [--device cuda] [--shape SHAPE] [--sequences N] [--engine-args JSON]
        [--profile]

Records `bench/results/rollout_engine.json`, unless `--profile` is given: it prints the milliseconds of each part of a
step under cProfile, which slows Python down. The engine runs in this process, as in a rollout process, and its requests
are those of a rollout: groups of 8 with seeds. The arms take turns for several rounds, so that noise of the machine
affects all alike. Fails unless both paths return the same tokens, and the same log-probabilities within 4e-6 (on CPUs:
the same bits). Takes one minute on two cores.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.harness.record import RESULTS, record
from rljob_api.algorithm import AlgorithmSpec
from rljob_memory.allocator import allocator_environment
from rljob_trainer.hardware import torch_version
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.rollout.config import RolloutConfig, engine_arguments, engine_environment

Arm = Literal["none", "public", "fast"]
ARMS: tuple[Arm, ...] = ("none", "public", "fast")

GROUP_SIZE = 8

PARTS = {
    "schedule": ("sched/scheduler.py", "schedule"),
    "schedule (fast)": ("fast_decoding.py", "schedule"),
    "model": ("gpu_model_runner.py", "execute_model"),
    "model (V2)": ("gpu/model_runner.py", "execute_model"),
    "sampling": ("gpu_model_runner.py", "sample_tokens"),
    "sampling (V2)": ("gpu/model_runner.py", "sample_tokens"),
    "update of the scheduler": ("sched/scheduler.py", "update_from_output"),
    "update of the scheduler (fast)": ("fast_decoding.py", "update_from_output"),
    "engine core in all": ("v1/engine/core_client.py", "get_output"),
    "engine in all": ("v1/engine/llm_engine.py", "step"),
    "of the rest, log-probabilities": ("v1/engine/logprobs.py", "update_from_output"),
}
"""Functions of vLLM and of this project by file and name. The times of their callees are included. The engine's time
beyond its core is the processing of outputs."""

Responses = list[tuple[list[int], list[float] | None]]


@dataclass(slots=True)
class MeasuredEngine:
    """An engine whose log-probabilities can be switched."""

    llm: Any
    device: str
    sequences: int
    tokens: int
    prompt_tokens: int
    start_seconds: float
    """Start of the engine, with its imports."""
    kernels: dict[str, Any]
    """vLLM's own kernels for log-probabilities, by name."""

    def use(self, arm: Arm) -> None:
        from vllm.v1.worker.gpu.sample import logprob

        from rljob_trainer.rollout.fast_decoding import install_fast_decoding

        engine = self.llm.llm_engine
        vars(logprob).update(self.kernels)
        for method in ("schedule", "update_from_output"):
            vars(engine.engine_core.engine_core.scheduler).pop(method, None)
        if arm == "fast" and not install_fast_decoding(self.llm):
            raise SystemExit("expected a version of vLLM that the fast path knows, found another")

    def generate(self, arm: Arm) -> Responses:
        from vllm import SamplingParams

        extra = {} if arm == "none" else {"logprobs": 0, "flat_logprobs": True}
        sampling = [
            SamplingParams(
                n=GROUP_SIZE,
                seed=seed,
                temperature=1.0,
                top_k=0,
                max_tokens=self.tokens,
                ignore_eos=True,
                detokenize=False,
                **extra,
            )
            for seed in range(self.sequences // GROUP_SIZE)
        ]
        prompts = [
            {"prompt_token_ids": [4 + seed % 32] + [5 + place % 50 for place in range(self.prompt_tokens - 1)]}
            for seed in range(len(sampling))
        ]
        outputs = [each for request in self.llm.generate(prompts, sampling, use_tqdm=False) for each in request.outputs]
        return [
            (list(each.token_ids), None if each.logprobs is None else list(each.logprobs.logprobs)) for each in outputs
        ]


def started(
    device: Literal["cpu", "cuda"],
    shape: str,
    sequences: int,
    tokens: int,
    cache: Path,
    engine_args: dict[str, Any] | None = None,
    prompt_tokens: int = 5,
) -> MeasuredEngine:
    one_thread = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}  # waiting threads would count as busy
    os.environ |= engine_environment(device) | allocator_environment("rollout", torch_version()) | one_thread
    model_dir = resolve_model(f"random://qwen3?{shape}", cache)
    began = time.perf_counter()
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    config = RolloutConfig(
        model_dir=model_dir,
        device=device,
        dtype="float32" if device == "cpu" else "bfloat16",
        max_model_len=tokens + prompt_tokens + 11,
        max_num_seqs=sequences,
        kv_cache_bytes=(1 << 30) if device == "cpu" else (32 << 30),
        algorithm=AlgorithmSpec(steps=1, max_response_tokens=tokens),
        # As in a job that shares its GPU with the policy.
        sleep_level=2,
        engine_args=engine_args or {},
    )
    llm = LLM(**engine_arguments(config, EngineArgs.__dataclass_fields__))
    from vllm.v1.worker.gpu.sample import logprob

    kernels = {name: getattr(logprob, name) for name in ("_topk_log_softmax_kernel", "_ranks_kernel")}
    return MeasuredEngine(llm, device, sequences, tokens, prompt_tokens, time.perf_counter() - began, kernels)


def compared(engine: MeasuredEngine, rounds: int) -> list[dict[str, Any]]:
    """One row per arm: milliseconds of a decoding step, of wall time and of the processors."""
    wall: dict[Arm, list[float]] = {arm: [] for arm in ARMS}
    processor: dict[Arm, list[float]] = {arm: [] for arm in ARMS}
    for number in range(rounds + 1):
        responses: dict[Arm, Responses] = {}
        for arm in ARMS:
            engine.use(arm)
            began, worked = time.perf_counter(), time.process_time()
            responses[arm] = engine.generate(arm)
            if number:  # the first round warms up
                wall[arm].append(1e3 * (time.perf_counter() - began) / engine.tokens)
                processor[arm].append(1e3 * (time.process_time() - worked) / engine.tokens)
        require_same(responses["public"], responses["fast"], 4e-6 if engine.device == "cuda" else 0)
    return [
        {
            "arm": arm,
            "sequences": engine.sequences,
            "processor_ms": round(min(processor[arm]), 2),
            "processor_ms_median": round(statistics.median(processor[arm]), 2),
            "ms": round(min(wall[arm]), 2),
            "ms_median": round(statistics.median(wall[arm]), 2),
        }
        for arm in ARMS
    ]


def require_same(expected: Responses, found: Responses, tolerance: float) -> None:
    if [tokens for tokens, _ in expected] != [tokens for tokens, _ in found]:
        raise SystemExit("expected the same tokens from both paths, found others")
    for (_, first), (_, second) in zip(expected, found, strict=True):
        if any(abs(a - b) > tolerance for a, b in zip(first or [], second or [], strict=True)):
            raise SystemExit(f"expected the same log-probabilities within {tolerance} from both paths, found others")


def print_parts(engine: MeasuredEngine) -> None:
    for arm in ARMS:
        engine.use(arm)
        engine.generate(arm)
        profile = cProfile.Profile()
        profile.runcall(engine.generate, arm)
        stats = pstats.Stats(profile)
        print(f"{arm}: {1e3 * stats.total_tt / engine.tokens:.2f} ms a step, of which")  # type: ignore[attr-defined]
        for part, (file, name) in PARTS.items():
            seconds = sum(
                entry[3]
                for (path, _, function), entry in stats.stats.items()  # type: ignore[attr-defined]
                if path.endswith(file) and function == name
            )
            if seconds:
                print(f"  {1e3 * seconds / engine.tokens:6.2f}  {part}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", default="", help="of a random model, as in random://qwen3?SHAPE")
    parser.add_argument("--sequences", type=int, default=128, help="that are generated at once")
    parser.add_argument("--tokens", type=int, default=128, help="of each response")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine-args", type=json.loads, default={}, metavar="JSON", help="as rollout.engineArgs")
    parser.add_argument("--profile", action="store_true", help="print the parts of a step; record nothing")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        engine = started(given.device, given.shape, given.sequences, given.tokens, Path(cache), given.engine_args)
        print(f"started in {engine.start_seconds:.1f} s", flush=True)
        if given.profile:
            print_parts(engine)
        else:
            rows = compared(engine, given.rounds)
            print(*rows, sep="\n")
            note = f"random://qwen3?{given.shape}".rstrip("?") + f", responses of {given.tokens} tokens in groups of 8"
            if given.engine_args:
                note += f", engine arguments {json.dumps(given.engine_args)}"
            print(record("rollout_engine", rows, note, given.output))
