"""verl programs that run out of memory on one GPU: the cause that is named, and the changes until they train.

    python -m bench.programs.verl_failures [FAILURE...]

Failures (GRPO of Qwen3-0.6B's shape, FSDP and vLLM on one GPU, responses of 512 tokens; verl is not modified):

    update             128 responses a micro-batch, without gradient checkpointing
    awake              the engine has 85 % of the GPU and does not free its memory during the update
    engine-too-large   the engine asks for more than the policy has left free

Each attempt runs under the probe. Its diagnosis and the recovery engine choose the next attempt's changes, as the
operator does. Needs verl (0.9). Records one row for each failure in `bench/results/verl_failures.json`, after those
that it already has.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.harness.needs import require_gpus, require_package
from bench.harness.record import RESULTS, record, recorded
from bench.harness.shapes import SHAPES
from bench.programs.adapter_recovery import job_spec, kept_directory, recovered
from rljob_trainer.models.resolve import resolve_model

NAME = "verl_failures"
STEPS = 3
STEP_MARK = " step:"
"""Begins verl's line of metrics, behind Ray's prefix. The names of metrics, as in timing_s/step:1, have no space."""
PROMPTS, GROUP, PROMPT_TOKENS, RESPONSE_TOKENS = 16, 8, 32, 512
_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
OPTIONS = {
    "update": [
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu={PROMPTS * GROUP}",
        f"{_MODEL}.enable_gradient_checkpointing=False",
    ],
    "awake": [
        f"{_ROLLOUT}.gpu_memory_utilization=0.85",
        f"{_ROLLOUT}.free_cache_engine=False",
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu=32",
        f"{_MODEL}.enable_gradient_checkpointing=False",
    ],
    "engine-too-large": [f"{_ROLLOUT}.gpu_memory_utilization=0.985"],
}
REWARD = """import zlib

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return zlib.crc32(solution_str.encode()) / 2**32
"""


def main(failures: list[str], results: Path, logs: Path | None) -> None:
    require_package("verl", without="trl")
    require_gpus(1)
    rows = recorded(NAME, results)
    for failure in failures or list(OPTIONS):
        with kept_directory(logs, failure) as directory:
            command = command_of(failure, resolve_model(f"random://qwen3?{SHAPES['0.6b']}"), directory)
            attempts = recovered(job_spec("Verl", gpus=1), command, None, directory, STEP_MARK)
        row = {"failure": failure, "options": OPTIONS[failure], "attempts": attempts}
        rows = [*(other for other in rows if other["failure"] != failure), row]
        note = "verl under the probe, adapter Verl; each attempt has the changes that the one before it led to"
        print(record(NAME, rows, note, results), flush=True)


def command_of(failure: str, model: Path, directory: Path) -> list[str]:
    """verl's command line. Writes its prompts and its reward function into `directory`."""
    import pandas

    (directory / "reward.py").write_text(REWARD)
    prompts = [
        {
            "prompt": [{"role": "user", "content": f"{number % 10}:"}],
            "data_source": "digits",
            "ability": "digits",
            "reward_model": {"style": "rule", "ground_truth": "0"},
            "extra_info": {"index": number},
        }
        for number in range(PROMPTS * STEPS)
    ]
    pandas.DataFrame(prompts).to_parquet(directory / "prompts.parquet")
    settings = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": directory / "prompts.parquet",
        "data.val_files": directory / "prompts.parquet",
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": PROMPT_TOKENS,
        "data.max_response_length": RESPONSE_TOKENS,
        f"{_MODEL}.path": model,
        # The model's tokenizer has no template of its own.
        f"{_MODEL}.custom_chat_template": "'{% for message in messages %}{{ message.content }}{% endfor %}'",
        f"{_MODEL}.use_remove_padding": False,
        f"+{_MODEL}.override_config.attn_implementation": "sdpa",
        f"{_ACTOR}.ppo_mini_batch_size": PROMPTS,
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu": 16,
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": 16,
        f"{_ROLLOUT}.name": "vllm",
        f"{_ROLLOUT}.n": GROUP,
        f"{_ROLLOUT}.tensor_model_parallel_size": 1,
        f"{_ROLLOUT}.max_model_len": PROMPT_TOKENS + RESPONSE_TOKENS,
        f"{_ROLLOUT}.ignore_eos": True,
        f"{_ROLLOUT}.enforce_eager": True,
        f"{_ROLLOUT}.gpu_memory_utilization": 0.3,
        f"{_ROLLOUT}.agent.num_workers": 1,
        "reward.num_workers": 1,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "reward.custom_reward_function.path": directory / "reward.py",
        "trainer.n_gpus_per_node": 1,
        "trainer.logger": "[console]",
        "trainer.val_before_train": False,
        "trainer.total_training_steps": STEPS,
        "trainer.default_local_dir": directory / "checkpoints",
        "hydra.run.dir": directory / "hydra",
    }
    settings |= dict(option.split("=", 1) for option in OPTIONS[failure])
    return [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{name}={value}" for name, value in settings.items())]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("failures", nargs="*", choices=[*OPTIONS, []], metavar="FAILURE", help=", ".join(OPTIONS))
    parser.add_argument("--logs", type=Path, help="where the output of the attempts is kept; default: nowhere")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    main(**vars(parser.parse_args()))
