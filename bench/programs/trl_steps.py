"""TRL's GRPOTrainer for a few steps on one GPU, colocated with vLLM: seconds and GPU memory by phase.

    python -m bench.programs.trl_steps CONFIG [--steps N] [--prompt-tokens N] [--own-ends] [--given-up-on-memory]

CONFIG: a YAML file with options of GRPOConfig and of `trl grpo` (`model_name_or_path`, `dtype`, `lora_r`), which `rljob
plan --from trl` reads, too. All responses have the maximum length, or, with `--own-ends`, the length at which the model
ends them; the prompts are digits, or as long as `--prompt-tokens` says. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}

import torch
import yaml
from datasets import Dataset
from transformers import TrainerCallback, TrainerControl
from trl import GRPOConfig, GRPOTrainer

from bench.harness.run_arms import quantiles
from bench.harness.samplers import DeviceUse
from rljob_trainer.telemetry.memory import first_visible_gpu

PHASES = ("rollout", "update", "sync")
SHORT_PROMPT = 16
"""Tokens that are enough for a digit."""


class PhaseClock(TrainerCallback):
    """Times of the steps, and of the rollouts and syncs in them; the rest of a step is its update."""

    def __init__(self, last: float = math.inf) -> None:
        """`last`: when the last step should have ended, in seconds since the epoch."""
        self._last = last
        self.steps: list[tuple[float, float]] = []
        self.inside: list[tuple[str, float, float]] = []
        """Phase, begin and end, in seconds since the epoch."""

    def on_step_begin(self, *_args: object, **_settings: object) -> None:
        self._begun = now()

    def on_step_end(self, _args: object, _state: object, control: TrainerControl, **_settings: object) -> None:
        self.steps.append((self._begun, now()))
        seconds = self.steps[-1][1] - self._begun
        print(f"step {len(self.steps)}: {seconds:.2f} s", file=sys.stderr, flush=True)
        if time.time() + seconds > self._last:
            control.should_training_stop = True

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*args: Any, **settings: Any) -> Any:
            begun = now()
            try:
                return call(*args, **settings)
            finally:
                self.inside.append((phase, begun, now()))

        return timed_call

    def spans(self, phase: str, warm_up_steps: int) -> list[list[tuple[float, float]]]:
        """Begin and end of the parts of each counted step that are of the phase."""
        return [list(self._spans(phase, *step)) for step in self.steps[warm_up_steps:]]

    def _spans(self, phase: str, begun: float, ended: float) -> Any:
        inside = sorted(span for span in self.inside if begun <= span[1] and span[2] <= ended)
        inside.sort(key=lambda span: span[1])
        if phase != "update":
            yield from ((since, until) for name, since, until in inside if name == phase)
            return
        for _, since, until in inside:
            yield begun, since
            begun = until
        yield begun, ended


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.time()


def main(given: argparse.Namespace) -> None:
    begun = time.perf_counter()
    options: dict[str, Any] = yaml.safe_load(given.config.read_text(encoding="utf-8"))
    model, dtype = options.pop("model_name_or_path"), options.pop("dtype", None)
    lora_rank = options.pop("lora_r", 0) if options.pop("use_peft", False) else 0
    options.pop("max_prompt_length", None)  # TRL 1.16 takes prompts of any length
    responses = options["per_device_train_batch_size"] * options["gradient_accumulation_steps"]
    of_engine: dict[str, Any] = {}
    if options["use_vllm"]:
        longest = options["max_completion_length"] + max(given.prompt_tokens, SHORT_PROMPT)
        of_engine = {"generation_kwargs": {"ignore_eos": not given.own_ends}, "vllm_max_model_length": longest}
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=given.steps,
        learning_rate=1e-6,
        model_init_kwargs={"dtype": dtype} if dtype else None,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        **of_engine,
        **options,
    )
    prompts = responses // options["num_generations"]
    clock = PhaseClock(time.time() + given.seconds)
    lengths: list[list[int]] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_others: object) -> list[float]:
        lengths.append([len(ids) for ids in completion_ids])
        return [float(len(set(text))) for text in completions]

    def prompt(number: int) -> str:
        return str(number % 10) * given.prompt_tokens if given.prompt_tokens else f"{number % 10}:"

    gpu = first_visible_gpu()
    with DeviceUse([] if gpu is None else [gpu]) as use:
        trainer = GRPOTrainer(
            model=model,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": prompt(number)} for number in range(prompts * given.steps)]),
            reward_funcs=reward,
            peft_config=adapters(lora_rank) if lora_rank else None,
            callbacks=[clock],
        )
        if config.use_vllm:
            engine = trainer.vllm_generation
            engine.generate = clock.timed("rollout", engine.generate)
            engine.sync_weights = clock.timed("sync", engine.sync_weights)
        start_up_seconds, failure = time.perf_counter() - begun, ""
        try:
            trainer.train()
        except torch.OutOfMemoryError as error:
            if not given.given_up_on_memory:
                raise
            failure = str(error)
    row = measured(clock, use, given.warm_up_steps) | {"start_up_seconds": start_up_seconds}
    if "seconds_per_step" in row:
        rates = [sum(of_step) / (ended - begun) for of_step, (begun, ended) in zip(lengths, clock.steps, strict=False)]
        row["tokens_per_second"] = statistics.median(rates[given.warm_up_steps :])
        row["response_tokens"] = quantiles([each for of_step in lengths[given.warm_up_steps :] for each in of_step])
    print(json.dumps(row | ({"failure": failure} if failure else {})))


def measured(clock: PhaseClock, use: DeviceUse, warm_up_steps: int) -> dict[str, Any]:
    seconds = [ended - begun for begun, ended in clock.steps]
    row: dict[str, Any] = {
        "all_seconds": seconds,
        "device_peak_bytes": max((used for _, used in use.samples), default=0),
    }
    if torch.cuda.is_available():
        row["torch_peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        row["torch_peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    if counted := seconds[warm_up_steps:]:
        row["seconds_per_step"] = statistics.median(counted)
        row["phases"] = {phase: of_phase(clock.spans(phase, warm_up_steps), use) for phase in PHASES}
    return row


def of_phase(spans: list[list[tuple[float, float]]], use: DeviceUse) -> dict[str, float]:
    """Peak bytes of the GPU in a phase, by all processes, and the median of its seconds in a step."""
    return {
        "gpu": use.peak([span for step in spans for span in step]),
        "seconds": statistics.median(sum(until - since for since, until in step) for step in spans),
    }


def adapters(rank: int) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up-steps", type=int, default=2, help="steps that are not counted")
    parser.add_argument(
        "--prompt-tokens", type=int, default=0, help="characters of each prompt, of models whose tokens these are"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no step that would end later")
    parser.add_argument("--own-ends", action="store_true", help="responses end where the model ends them")
    parser.add_argument(
        "--given-up-on-memory",
        action="store_true",
        help="if memory runs out, report the steps until then instead of failing",
    )
    main(parser.parse_args())
