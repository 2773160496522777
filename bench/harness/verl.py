"""verl's GRPO in processes of its own, as an arm of a comparison: its settings, its command and its row."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from bench.harness.record import require_package
from bench.harness.samplers import DeviceUse, Sampler
from rljob_testing.machine import run_for
from rljob_testing.plan_accuracy.errors import TIMED_OUT, Row
from rljob_testing.verl_output import measured
from rljob_trainer.telemetry.memory import first_visible_gpu

PROMPT_TOKENS = 32
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
REWARD = """import zlib

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return zlib.crc32(solution_str.encode()) / 2**32
"""


@dataclass(frozen=True, slots=True)
class Batch:
    """A step: prompts, responses to each, and tokens of each response."""

    prompts: int
    group_size: int
    response_tokens: int


def grpo_settings(model: Path, directory: Path, batch: Batch, steps: int) -> dict[str, Any]:
    """Settings of GRPO on one GPU next to vLLM, without a KL term and with one update a step, in which all responses
    have the maximum length. Writes the prompts and the reward function into `directory`."""
    import pandas

    (directory / "reward.py").write_text(REWARD)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{number % 10}:"}],
            "data_source": "digits",
            "ability": "digits",
            "reward_model": {"style": "rule", "ground_truth": "0"},
            "extra_info": {"index": number},
        }
        for number in range(batch.prompts * steps)
    ]
    pandas.DataFrame(rows).to_parquet(directory / "prompts.parquet")
    return {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": directory / "prompts.parquet",
        "data.val_files": directory / "prompts.parquet",
        "data.train_batch_size": batch.prompts,
        "data.max_prompt_length": PROMPT_TOKENS,
        "data.max_response_length": batch.response_tokens,
        f"{MODEL}.path": model,
        # The model's tokenizer has no template of its own.
        f"{MODEL}.custom_chat_template": "'{% for message in messages %}{{ message.content }}{% endfor %}'",
        f"{MODEL}.use_remove_padding": False,
        f"+{MODEL}.override_config.attn_implementation": "sdpa",
        f"{ACTOR}.ppo_mini_batch_size": batch.prompts,
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.n": batch.group_size,
        f"{ROLLOUT}.tensor_model_parallel_size": 1,
        f"{ROLLOUT}.max_model_len": PROMPT_TOKENS + batch.response_tokens,
        f"{ROLLOUT}.ignore_eos": True,
        f"{ROLLOUT}.agent.num_workers": 1,
        "reward.num_workers": 1,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "reward.custom_reward_function.path": directory / "reward.py",
        "trainer.n_gpus_per_node": 1,
        "trainer.logger": "[console]",
        "trainer.val_before_train": False,
        "trainer.total_training_steps": steps,
        "trainer.default_local_dir": directory / "checkpoints",
        "hydra.run.dir": directory / "hydra",
    }


def verl_command(settings: Mapping[str, Any]) -> list[str]:
    return [sys.executable, "-m", "verl.trainer.main_ppo", *as_options(settings)]


def as_options(settings: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in settings.items()]


class FollowedLog(Sampler):
    """The lines of a file as a program writes them, which also go to stderr."""

    seconds_between_samples = 0.1

    def __init__(self, path: Path) -> None:
        super().__init__()
        path.touch()
        self._file = path.open(errors="replace", newline="\n")
        self._begun = ""
        self.lines: list[tuple[float, str]] = []
        """Seconds since the epoch, and the line."""

    def sample(self) -> None:
        *complete, self._begun = (self._begun + self._file.read()).split("\n")
        self.lines += ((time.time(), line) for line in complete)
        print(*complete, sep="\n", end="\n" if complete else "", file=sys.stderr, flush=True)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.sample()
        self._file.close()


def verl_row(model: Path, batch: Batch, chosen: Mapping[str, Any], steps: int, most_seconds: float) -> Row:
    """Run verl with the `chosen` settings, for at most `most_seconds`: exit code, and measurements of the steps until
    then. Exits with a message if verl is missing."""
    require_package("verl", without="trl")
    directory, gpu, begun = Path(mkdtemp()), first_visible_gpu(), time.time()
    command = verl_command(grpo_settings(model, directory, batch, steps) | dict(chosen))
    # Ray's monitor compares memory with a total that grows on some virtual machines.
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "RAY_memory_monitor_refresh_ms": "0"}
    log = FollowedLog(directory / "verl.log")
    with DeviceUse([] if gpu is None else [gpu]) as use, log:
        exit_code = run_for(command, directory / "verl.log", most_seconds, variables)
    row = {"exit_code": TIMED_OUT if exit_code is None else exit_code, "settings": as_options(chosen)}
    row["device_peak_bytes"] = max((used for _, used in use.samples), default=0)
    return row | measured(log.lines, begun, batch.prompts * batch.group_size)
