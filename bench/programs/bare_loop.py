"""The arithmetic of `examples/digits.yaml` as one bare loop in one process: no Ray, no ledger, no checkpoints.

The baseline of bench/programs/overhead.py: same model, sampling settings, loss and optimizer, one vLLM engine in the
process. Prints one JSON line: start-up seconds, and seconds per step by phase.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}
STARTED = time.perf_counter()

import torch  # noqa: E402  (the environment must be set before)
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

PROMPTS, GROUP, RESPONSE_TOKENS = 8, 8, 4
ENTROPY_COEFFICIENT, LEARNING_RATE = 0.05, 3e-3


def main(model_dir: str, steps: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    policy = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
    engine = LLM(
        model=model_dir, dtype="float32", enforce_eager=True, max_model_len=128, seed=0, kv_cache_memory_bytes=64 << 20
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    digits = [tokenizer(str(digit)).input_ids[0] for digit in range(10)]
    start_up_seconds = time.perf_counter() - STARTED

    draw, rewards = random.Random(0), []
    seconds: dict[str, list[float]] = {"rollout": [], "update": [], "sync": [], "step": []}
    for step in range(steps):
        begun = time.perf_counter()
        asked = draw.sample(range(10), PROMPTS)
        prompts = [tokenizer(f"{digit}:").input_ids for digit in asked]
        sampling = [
            SamplingParams(
                n=GROUP, temperature=1.0, max_tokens=RESPONSE_TOKENS, ignore_eos=True, logprobs=0, seed=step * 100 + i
            )
            for i in range(PROMPTS)
        ]
        answers = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        generated = time.perf_counter()

        tokens = torch.tensor([p + list(c.token_ids) for p, a in zip(prompts, answers, strict=True) for c in a.outputs])
        reward = torch.tensor(
            [
                [sum(token == digits[digit] for token in c.token_ids) / RESPONSE_TOKENS for c in a.outputs]
                for digit, a in zip(asked, answers, strict=True)
            ]
        )
        advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-6)).view(-1, 1)
        first = len(prompts[0])
        logprobs = torch.log_softmax(policy(tokens[:, :-1]).logits[:, first - 1 :], -1)
        chosen = logprobs.gather(2, tokens[:, first:, None])[..., 0]
        ratio = (chosen - chosen.detach()).exp()
        clipped = ratio.clamp(0.8, 1.28)
        entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
        loss = -torch.min(ratio * advantage, clipped * advantage).mean() - ENTROPY_COEFFICIENT * entropy
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        updated = time.perf_counter()

        weights = ((name, parameter.detach()) for name, parameter in policy.named_parameters())
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        engine.reset_prefix_cache()
        synced = time.perf_counter()
        rewards.append(float(reward.mean()))
        for phase, value in zip(
            seconds, (generated - begun, updated - generated, synced - updated, synced - begun), strict=True
        ):
            seconds[phase].append(value)

    print(
        json.dumps(
            {
                "start_up_seconds": start_up_seconds,
                "seconds_by_phase": {phase: statistics.median(values[5:]) for phase, values in seconds.items()},
                "last_reward": sum(rewards[-5:]) / 5,
            }
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir")
    parser.add_argument("--steps", type=int, default=60)
    main(**vars(parser.parse_args()))
