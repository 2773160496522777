"""SmolLM2-135M-Instruct learns word problems like those of GSM8K, with RLJob and with TRL, on one GPU each.

    python -m bench.programs.gsm warm-up --model DIR        # once, before both arms
    python -m bench.programs.gsm rljob|trl --model DIR [--seconds N] [--results DIR]
    python -m bench.programs.gsm page                       # print the table of docs/benchmarks.md

`warm-up` trains the model of `examples/gsm.yaml` (`make model`), which solves hardly any problem as it is, on worked
solutions of problems with other numbers, with TRL's SFTTrainer, and writes it to DIR. Both arms then train DIR as the
example does: the same prompts in the same order, with the same reward, batch, learning rate, loss and sampling. They
evaluate the same held-out problems after the same steps, greedily. `trl`: GRPOTrainer, colocated with vLLM, float32
weights, autocast to bfloat16. The arms end after the example's steps or `--seconds`, and write a row of
`bench/results/gsm.json`. `--smoke`: two short steps on a CPU (not `trl`: it cannot sync weights there).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import yaml
from transformers import AutoTokenizer

from bench.harness.record import RESULTS, record_row, require_package
from rljob_api.job import RLJobSpec
from rljob_client.run_directory.ledger import read_ledger
from rljob_client.run_directory.records import evaluation_records, step_records
from rljob_testing.plan_accuracy.errors import TIMED_OUT
from rljob_testing.repository import EXAMPLES
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.rollout_batch import Prompt
from rljob_trainer.tasks.build import build_task
from rljob_trainer.tasks.held_out import held_out
from rljob_trainer.tasks.rewards import Response
from rljob_trainer.tasks.task import Task

BEGUN = psutil.Process().create_time()
NOTE = (
    "examples/gsm.yaml after a warm-up on worked solutions; at: seconds since the program began; reward: mean of the "
    "step's responses; accuracy: share of the held-out problems solved greedily"
)
WARM_UP: dict[str, Any] = {"per_device_train_batch_size": 64, "learning_rate": 3e-4, "warmup_steps": 10}
WARM_UP_SEED = 10_000_000
"""reasoning-gym draws problem i of seed s with the seed s + i: far from those of the job."""
TRL_MICRO_BATCH = 64
"""Responses. 128 need 60 GiB for activations and logits."""


def job(path: Path, smoke: bool) -> dict[str, Any]:
    manifest: dict[str, Any] = yaml.safe_load(path.read_text())
    if smoke:
        spec = manifest["spec"]
        spec["algorithm"] |= {"steps": 2, "promptsPerStep": 2, "groupSize": 4, "maxResponseTokens": 24}
        spec["task"]["args"]["size"] = 20
        spec["evaluation"] |= {"heldOut": 4, "everySteps": 1}
    return manifest


def task_of(spec: RLJobSpec, model: Path, seed: int) -> Task:
    return build_task(spec.task, AutoTokenizer.from_pretrained(model), spec.algorithm.max_prompt_tokens, EXAMPLES, seed)


def reward_of(task: Task, prompt: Prompt, text: str) -> float:
    [reward] = task.rewards
    return float(reward([Response(prompt.text, prompt.item, text, [], finished=True)]))


def warm_up(manifest: dict[str, Any], model: Path, steps: int, smoke: bool) -> None:
    """Write the model of the example, trained on worked solutions, in bfloat16."""
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    options = {"max_steps": steps, **WARM_UP} | ({"max_steps": 2, "per_device_train_batch_size": 2} if smoke else {})
    examples = options["max_steps"] * options["per_device_train_batch_size"]
    manifest["spec"]["task"]["args"]["size"] = examples
    initial = resolve_model(manifest["spec"]["model"]["uri"])
    task = task_of(RLJobSpec.model_validate(manifest["spec"]), initial, WARM_UP_SEED)
    prompts = [task.prompt(index) for index in range(examples)]
    rows = [{"prompt": each.text, "completion": each.item["metadata"]["answer_cot"]} for each in prompts]
    options |= {"bf16": not smoke, "use_cpu": smoke, "gradient_checkpointing": False, "logging_steps": 10}
    config = SFTConfig(output_dir=str(model), save_strategy="no", report_to=[], **options)
    trainer = SFTTrainer(model=str(initial), args=config, train_dataset=Dataset.from_list(rows))
    trainer.train()
    trainer.model.to(torch.bfloat16).save_pretrained(model)
    trainer.processing_class.save_pretrained(model)


class ArmRow:
    """The row of an arm."""

    def __init__(self, arm: str, results: Path | None) -> None:
        self._results = results
        self.values: dict[str, Any] = {"arm": arm, "exit_code": TIMED_OUT, "steps": [], "evaluations": []}

    def add_step(self, at: float, seconds: float, reward: float, tokens: float) -> None:
        row = {"at": at - BEGUN, "seconds": seconds, "reward": reward, "tokens": tokens}
        self._add("steps", {name: round(value, 4) for name, value in row.items()})

    def add_evaluation(self, step: int, at: float, seconds: float, accuracy: float) -> None:
        row = {"step": step, "at": at - BEGUN, "seconds": seconds, "accuracy": accuracy}
        self._add("evaluations", {name: round(value, 4) for name, value in row.items()})

    def _add(self, name: str, row: dict[str, float]) -> None:
        self.values[name].append(row)
        print(name, len(self.values[name]), json.dumps(row), flush=True)

    def write(self, **values: Any) -> None:
        self.values |= values
        if self._results:
            record_row("gsm", self.values, "arm", NOTE, self._results)


def rljob(manifest: dict[str, Any], model: Path, output: Path, seconds: float, row: ArmRow) -> None:
    manifest["spec"]["model"]["uri"] = f"file://{model.resolve()}"
    manifest["spec"]["checkpoint"]["everySteps"] = manifest["spec"]["algorithm"]["steps"]  # TRL writes none
    output.mkdir(parents=True, exist_ok=True)
    (output / "job.yaml").write_text(yaml.safe_dump(manifest))
    command = [sys.executable, "-m", "rljob_client", "run", "job.yaml", "--output", "run"]
    running = subprocess.Popen(command, cwd=output, start_new_session=True)
    code: int | None = None
    while code is None and time.time() - BEGUN < seconds:
        time.sleep(0.5)
        code = running.poll()
        add_ledger(output / "run" / "ledger.jsonl", row)
    if code is None:
        os.killpg(running.pid, signal.SIGKILL)
    row.write(exit_code=TIMED_OUT if code is None else code)


def add_ledger(ledger: Path, row: ArmRow) -> None:
    records = read_ledger(ledger).records
    for step in step_records(records)[len(row.values["steps"]) :]:
        row.add_step(step.committed_at, step.total_seconds, step.reward.mean, step.response.mean_tokens)
    for each in evaluation_records(records)[len(row.values["evaluations"]) :]:
        row.add_evaluation(each.step, each.evaluated_at, each.seconds, each.metrics["pass@1"])
        row.write()


def trl(manifest: dict[str, Any], model: Path, output: Path, seconds: float, row: ArmRow) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from vllm import SamplingParams

    spec = RLJobSpec.model_validate(manifest["spec"])
    algorithm, evaluation = spec.algorithm, spec.evaluation
    assert evaluation
    every_steps = evaluation.every_steps or algorithm.steps
    training, tested = held_out(task_of(spec, model, algorithm.seed), evaluation.held_out)
    prompts = [
        each for step in range(algorithm.steps) for each in training.prompts(step + 1, algorithm.prompts_per_step)
    ]
    asked = {each.index: each for each in prompts}
    questions = [tested.prompt(index) for index in tested.indices]
    rollouts: list[tuple[float, float]] = []

    def score(completions: list[str], completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
        scores = [reward_of(training, asked[i], text) for i, text in zip(index, completions, strict=True)]
        rollouts.append((statistics.fmean(scores), statistics.fmean(map(len, completion_ids))))
        return scores

    class StepClock(TrainerCallback):
        """Records steps, evaluates between them, and ends the training in time."""

        def on_train_begin(self, *_args: Any, **_settings: Any) -> None:
            self.evaluate(0)

        def on_step_begin(self, *_args: Any, **_settings: Any) -> None:
            self.begun = time.time()

        def on_step_end(self, _args: Any, state: Any, control: Any, **_settings: Any) -> None:
            row.add_step(time.time(), time.time() - self.begun, *rollouts[-1])
            if state.global_step % every_steps == 0:
                trainer.vllm_generation.sync_weights()
                trainer._last_loaded_step = state.global_step  # not once more before the next step
                self.evaluate(state.global_step)
            control.should_training_stop |= time.time() - BEGUN > seconds

        def evaluate(self, step: int) -> None:
            begun = time.time()
            given = [{"prompt_token_ids": each.token_ids} for each in questions]
            greedy = SamplingParams(temperature=0, max_tokens=algorithm.max_response_tokens)
            texts = [
                each.outputs[0].text for each in trainer.vllm_generation.llm.generate(given, greedy, use_tqdm=False)
            ]
            solved = [reward_of(tested, each, text) >= 1 for each, text in zip(questions, texts, strict=True)]
            row.add_evaluation(step, time.time(), time.time() - begun, statistics.fmean(solved))
            row.write()

    responses = algorithm.prompts_per_step * algorithm.group_size
    micro_batch, smoke = min(TRL_MICRO_BATCH, responses), responses < TRL_MICRO_BATCH
    trainer = GRPOTrainer(
        model=str(model),
        args=GRPOConfig(
            output_dir=str(output),
            max_steps=algorithm.steps,
            num_generations=algorithm.group_size,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=responses // micro_batch,
            max_completion_length=algorithm.max_response_tokens,
            temperature=algorithm.temperature,
            learning_rate=algorithm.learning_rate,
            lr_scheduler_type="constant",
            weight_decay=algorithm.weight_decay,
            loss_type="dapo",  # the mean over the tokens of the step, as RLJob's TokenMean
            vllm_importance_sampling_mode="token_truncate",
            vllm_importance_sampling_clip_max=algorithm.importance_sampling.cap,
            shuffle_dataset=False,
            bf16=not smoke,
            use_cpu=smoke,
            gradient_checkpointing=False,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_max_model_length=algorithm.max_prompt_tokens + algorithm.max_response_tokens,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": each.text, "index": each.index} for each in prompts]),
        reward_funcs=score,
        callbacks=[StepClock()],
    )
    assert trainer.processing_class(prompts[0].text).input_ids == prompts[0].token_ids
    trainer.train()
    row.write(exit_code=0 if len(rollouts) == algorithm.steps else TIMED_OUT)


def page() -> str:
    rows = {row["arm"]: row for row in json.loads((RESULTS / "gsm.json").read_text())["rows"]}
    arms = [rows["rljob"], rows["trl"]]
    lines: dict[str, list[str]] = {}
    for number, arm in enumerate(arms):
        rewards, seconds = ([each[name] for each in arm["steps"]] for name in ("reward", "seconds"))
        cells = {
            f"solved after {e['step']} steps": f"{e['accuracy']:.1%}, at {e['at']:.0f} s" for e in arm["evaluations"]
        }
        cells["mean reward, first and last five steps"] = (
            f"{statistics.fmean(rewards[:5]):.2f}, {statistics.fmean(rewards[-5:]):.2f}"
        )
        cells["steps; median seconds of one"] = f"{len(seconds)}; {statistics.median(seconds[2:]):.2f}"
        cells["first step done at"] = f"{arm['steps'][0]['at']:.0f} s"
        for name, cell in cells.items():
            lines.setdefault(name, ["–"] * len(arms))[number] = cell
    return "\n".join(
        ["| | RLJob | TRL |", "|---|---|---|", *(f"| {name} | {' | '.join(cells)} |" for name, cells in lines.items())]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("warm-up", "rljob", "trl", "page"))
    parser.add_argument("--model", type=Path, default=Path("runs/gsm/model"), help="directory of the model")
    parser.add_argument("--manifest", type=Path, default=EXAMPLES / "gsm.yaml", help="of the job")
    parser.add_argument("--warm-up-steps", type=int, default=120, help="of 64 problems")
    parser.add_argument("--output", type=Path, default=Path("runs/gsm"), help="directory of the run")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the JSON")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="end after this time, with the steps until then"
    )
    parser.add_argument("--smoke", action="store_true", help="two short steps on a CPU; records nothing")
    given = parser.parse_args()
    manifest = job(given.manifest, given.smoke)
    if given.part in ("warm-up", "trl"):
        require_package("trl")
    if given.part == "page":
        print(page())
    elif given.part == "warm-up":
        warm_up(manifest, given.model, given.warm_up_steps, given.smoke)
    else:
        arm = rljob if given.part == "rljob" else trl
        row = ArmRow(given.part, None if given.smoke else given.results)
        row.values["algorithm"] = manifest["spec"]["algorithm"]
        arm(manifest, given.model, given.output / given.part, given.seconds, row)


if __name__ == "__main__":
    main()
