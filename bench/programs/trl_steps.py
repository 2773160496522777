"""Seconds per step and peak memory of TRL's GRPOTrainer, colocated with vLLM, with the workload of large_models.

Arms of bench/programs/large_models.py, on the same GPU as `rljob run`: the same model,
prompts and number of completions and tokens, float32 weights with bfloat16 compute (or `--dtype bfloat16`), the engine
asleep during the update. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time

os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.harness.samplers import DevicePeak


class StepClock(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_args: object, **_settings: object) -> None:
        torch.cuda.synchronize()
        self.begun = time.perf_counter()

    def on_step_end(self, *_args: object, **_settings: object) -> None:
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.begun)


def main(given: argparse.Namespace) -> None:
    begun = time.perf_counter()
    completions, response_tokens = given.prompts * given.group_size, given.response_tokens
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=given.steps,
        per_device_train_batch_size=given.micro_batch,
        gradient_accumulation_steps=completions // given.micro_batch,
        num_generations=given.group_size,
        max_completion_length=response_tokens,
        generation_kwargs={"ignore_eos": True},
        learning_rate=1e-6,
        beta=0.0,
        bf16=True,
        model_init_kwargs={"dtype": given.dtype},
        gradient_checkpointing=given.gradient_checkpointing,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=not given.awake,
        vllm_gpu_memory_utilization=given.engine_share,
        vllm_max_model_length=response_tokens + 16,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    clock, device = StepClock(), DevicePeak()
    device.start()
    trainer = GRPOTrainer(
        model=given.model_dir,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": f"{digit % 10}:"} for digit in range(given.prompts * given.steps)]),
        reward_funcs=lambda completions, **_kwargs: [float(len(set(text))) for text in completions],
        callbacks=[clock],
    )
    start_up_seconds = time.perf_counter() - begun
    failure = ""
    try:
        trainer.train()
    except torch.OutOfMemoryError as error:
        if not given.given_up_on_memory:
            raise
        failure = str(error)
    row = {
        "start_up_seconds": start_up_seconds,
        "all_seconds": clock.seconds,
        "device_peak_bytes": device.peak_bytes,
        "torch_peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "torch_peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }
    # The first steps pay for warm-up, here as in the other arm.
    if counted := clock.seconds[2:]:
        seconds = statistics.median(counted)
        row |= {"seconds_per_step": seconds, "tokens_per_second": completions * response_tokens / seconds}
    print(json.dumps(row | ({"failure": failure} if failure else {})))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--response-tokens", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--engine-share", type=float, default=0.3, help="of the GPU's memory, for vLLM")
    parser.add_argument("--awake", action="store_true", help="the engine does not sleep during the update")
    parser.add_argument(
        "--given-up-on-memory",
        action="store_true",
        help="if memory runs out, report the steps until then instead of failing",
    )
    main(parser.parse_args())
