"""Where the seconds of one rollout go on a GPU: variants of the sampling side by side, then a profile of Python.

The rollouts of bench/h200_step.yaml (128 completions of 512 tokens), one engine with random weights, no policy.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import time
from pathlib import Path
from typing import Any

from rljob_trainer.rollout.environment import engine_environment

os.environ.update(engine_environment("cuda"))

from rljob_api.manifest import load_manifest
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.rollout.config import RolloutConfig
from rljob_trainer.rollout.engine import RolloutEngine

PROMPTS = [[4 + digit % 10, 48] for digit in range(16)]
GROUP, RESPONSE = 8, 512
SAMPLING: dict[str, dict[str, Any]] = {
    "as used": {},
    "with text": {"detokenize": True},
    "without seeds": {"seed": None},
    "without log-probabilities": {"logprobs": None},
}


def main(profile: Path | None, engine_args: list[str]) -> None:
    model = resolve_model(load_manifest(Path(__file__).with_name("h200_step.yaml")).spec.model.uri)
    extra = {name: eval(value) for name, value in (argument.split("=", 1) for argument in engine_args)}
    config = RolloutConfig(
        model_dir=model,
        device="cuda",
        dtype="bfloat16",
        max_model_len=528,
        max_num_seqs=128,
        kv_cache_bytes=8 << 30,
        max_response_tokens=RESPONSE,
        ignore_eos=True,
        engine_args=extra,
    )
    begun = time.perf_counter()
    engine = RolloutEngine(0, config)
    engine.start()
    print(f"start {time.perf_counter() - begun:.1f} s with {extra or 'the usual arguments'}", flush=True)
    for name, changes in SAMPLING.items():
        seconds = [generate(engine, changes, step) for step in range(4)]
        median = statistics.median(seconds[1:])
        tokens_per_second = len(PROMPTS) * GROUP * RESPONSE / median
        print(f"{name:<28} {median:.2f} s, {tokens_per_second:,.0f} tokens/s (first {seconds[0]:.2f} s)", flush=True)
    if profile:
        profiler = cProfile.Profile()
        profiler.runcall(generate, engine, {}, 9)
        with profile.open("w") as file:
            pstats.Stats(profiler, stream=file).sort_stats("tottime").print_stats(45)


def generate(engine: RolloutEngine, changes: dict[str, Any], step: int) -> float:
    sampling = [engine._sampling(GROUP, step * 100 + prompt) for prompt in range(len(PROMPTS))]
    for parameters in sampling:
        for name, value in changes.items():
            setattr(parameters, name, value)
    begun = time.perf_counter()
    engine._llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
    return time.perf_counter() - begun


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path, help="where a table of Python functions goes")
    parser.add_argument("--engine-args", nargs="*", default=[], help="NAME=VALUE, further arguments of vLLM")
    main(**vars(parser.parse_args()))
