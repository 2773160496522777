"""An invalid field or value is answered with the one to write: RLJob's own, or that of another program's option."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rljob_api.algorithms import ALGORITHMS
from rljob_api.job import RLJob
from rljob_api.manifest import Problem
from rljob_api.manifest.option_names import OPTION_NAMES, OPTION_VALUES, normalized
from rljob_api.manifest.problems import schema_at
from rljob_api.schemas import Schema, inlined_schema
from rljob_api.task_args import TASKS, DatasetArgs

ProblemsOf = Callable[[str], list[Problem]]
REQUIRED = {"model": "{uri: 'hf://a/b'}", "task": "{name: digits}", "algorithm": "{steps: 1}"}


def manifest(spec: str, metadata: str = "{name: job}") -> str:
    others = "".join(f"  {name}: {text}\n" for name, text in REQUIRED.items() if not spec.startswith(f"{name}:"))
    return f"apiVersion: rljob.dev/v1alpha1\nkind: RLJob\nmetadata: {metadata}\nspec:\n{others}  {spec}\n"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("algorithm: {}", "algorithm.steps: required: Number of steps"),
        ("algorithm: {steps: 3, groupsize: 4}", "algorithm.groupsize: unknown field; did you mean groupSize?"),
        ("algorithm: {steps: 3, group_size: 4}", "algorithm.group_size: unknown field; did you mean groupSize?"),
        ("learningRate: 1.0e-5", "learningRate: unknown field here: write it as spec.algorithm.learningRate"),
        ("name: digits", "name: unknown field here: write it as spec.task.name"),
        (
            "recovery: {patience: 3}",
            "recovery.patience: unknown field; the fields here are maxAdjustments, maxRestarts, phase",
        ),
        ("memory: {kvCache: 10GB}", 'a quantity of bytes such as 512Mi or 4Gi, found "10GB"; write 10Gi or 10G'),
        ("model: {uri: Qwen/Qwen3-0.6B}", 'found "Qwen/Qwen3-0.6B"; did you mean hf://Qwen/Qwen3-0.6B?'),
        ("algorithm: {steps: three}", 'algorithm.steps: expected a whole number from 1 to 10000000, found "three"'),
        ("algorithm: {steps: '3'}", 'expected a whole number from 1 to 10000000, found "3"; remove the quotes'),
        ("algorithm: {steps: 3.5}", "algorithm.steps: expected a whole number from 1 to 10000000, found 3.5"),
        ("algorithm: {steps: true}", "algorithm.steps: expected a whole number from 1 to 10000000, found true"),
        ("algorithm: {steps: 3, groupSize: 1}", "algorithm.groupSize: expected a whole number from 2 to 1024, found 1"),
        ("algorithm: {steps: 3, clipLow: 1.0}", "algorithm.clipLow: expected a number above 0 and below 1, found 1.0"),
        (
            "algorithm: {steps: 3, learningRate: .nan}",
            "learningRate: expected a number above 0 and at most 1, found NaN",
        ),
        ("topology: colocated", 'expected Colocated or Disaggregated, found "colocated"; did you mean Colocated?'),
        ("memory: {emptyCache: on}", "emptyCache: expected Auto, Enabled or Disabled, found true; write Enabled"),
        ("memory: {rolloutSleep: off}", "Level1 or Level2, found false; write Disabled (YAML reads off"),
        ("memory: {microBatchTokens: 0}", "expected Auto or a whole number of at least 1, found 0"),
        ("rollout: {tensorParallelSize: 17}", "expected Auto or a whole number from 1 to 16, found 17"),
        (
            "rollout: {tensorParallelSize: auto}",
            'expected Auto or a whole number from 1 to 16, found "auto"; write Auto',
        ),
        ("controller: here", "controller: expected an object with the fields requireGpuFreeNode, template, found"),
        ("trainer: {image: mine, args: [--fast, 3]}", "args[1]: expected a string of at most 4096 characters, found 3"),
        ("model: {uri: ./smollm2}", "expected a URI that begins with oci://, hf://, pvc://, file:// or random://"),
        ("task: {name: digit}", f"expected {', '.join(TASKS)}, or a Python function as module:function"),
        ("task: {name: jsonl, args: {path: a}}", "task.reward: required for this"),
        ("task: {name: reasoning-gym}", "task.args.dataset: write the name of one reasoning-gym data set here, or"),
        (
            "task: {name: reasoning-gym, args: {dataset: chain_sum, datasets: [{dataset: chain_sum}]}}",
            "task.args.dataset: write the name of one reasoning-gym data set here, or several",
        ),
        (
            "task: {name: reasoning-gym, args: {datasets: [{dataset: chain_sum, weight: 0}]}}",
            "task.args.datasets[0].weight: expected a number above 0",
        ),
        ("task: {name: reasoning-gym, args: {datasets: [{weight: 1}]}}", "datasets[0].dataset: required: Name of a"),
        (
            "task: {name: dataset, reward: 'r:f', args: {path: parquet}}",
            "task.args.dataFiles: required for this path, which is a format",
        ),
        (
            "task: {name: dataset, reward: 'r:f', args: {path: a/b, split: 3}}",
            'at least 1 and at most 1024 characters, found 3; write "3", with quotes',
        ),
        (
            "task: {name: digits, chatTemplateArgs: {tokenize: true}}",
            "task.chatTemplateArgs.tokenize: RLJob sets it itself: remove it",
        ),
        (
            "task: {name: digits, rewards: [{name: math_verfy}]}",
            "task.rewards[0].name: expected function: module:function, or the name of a built-in reward function: ",
        ),
        ("task: {name: digits, rewards: [{name: math_verfy}]}", "; did you mean math_verify?"),
        ("task: {name: digits, rewards: [{function: judg}]}", "task.rewards[0].function: expected task, exact_match,"),
        (
            "task: {name: digits, rewards: [{name: length, args: {maxTokens: 9}}]}",
            "args.bufferTokens: required: Tokens",
        ),
        (
            "task: {name: digits, rewards: [{name: regex, args: {pattern: a(}}]}",
            "args.pattern: expected a Python regular",
        ),
        (
            "task: {name: digits, rewards: [{name: exact_match, args: {ignorecase: true}}]}",
            "rewards[0].args.ignorecase: unknown field; did you mean ignoreCase?",
        ),
        (
            "task: {name: digits, rewards: [{name: judge, args: {url: judge, model: m, prompt: '{response}'}}]}",
            "args.url: expected an address, such as http://judge:8000/v1, found",
        ),
        (
            "task: {name: digits, rewards: [{name: judge, args: {url: 'http://a', model: m, prompt: rate}}]}",
            "args.prompt: expected a string that contains {response}, found",
        ),
        (
            "task: {name: digits, rewards: [{name: regex, batch: true, args: {pattern: a}}]}",
            "batch: is for Python functions",
        ),
        (
            "task: {name: digits, rewards: [{function: 'a:f'}, {function: 'b:f'}]}",
            "task.rewards: two reward functions are named f: write a `name` for each",
        ),
        (
            "task: {name: jsonl, args: {path: a}, rewards: [{name: task}]}",
            "task.rewards: this task has no reward of its own: remove `task` from the list",
        ),
        ("task: {name: digits, rewards: [a:f]}", 'write rewards: {function: "a:f"}'),
        ("task: {name: digits, reward_funcs: [a]}", "did you mean rewards? (as [{function: module:function, weight:"),
        ("task: {name: digits, reward_weights: [1]}", "did you mean rewards? (weight of each)"),
        ("reward_model: {enable: true}", "write spec.task.rewards (as [{name: reward_model, args:"),
        (
            "task: {name: digits, args: {size: 3}}",
            "args.size: unknown field: remove it, since no fields are allowed here",
        ),
        (
            "task: {name: jsonl, reward: 'r:f', args: {path: a, prompt_field: q}}",
            "unknown field; did you mean promptField?",
        ),
        (
            "task: {name: digits, promptTemplate: 'Say it'}",
            "promptTemplate: expected a string that contains",
        ),
        ("task: {name: digits, answer: {pattern: 'a(b'}}", "task.answer.pattern: expected a Python regular expression"),
        ("task: {name: digits, answer: {pattern: '[0-9]+'}}", "task.answer.pattern: expected one group"),
        ("rollout: {engineArgs: {tensor_parallel_size: 2}}", "must not set tensor_parallel_size (write spec.rollout."),
        ("rollout: {replicas: 2}", "rollout.replicas: requires topology: Disaggregated"),
        ("algorithm: {steps: 1, num_generations: 8}", "did you mean groupSize?"),
        ("algorithm: {steps: 1, numGenerations: 8}", "did you mean groupSize?"),
        ("rollout: {n: 8}", "write spec.algorithm.groupSize"),
        ("rollout: {temperature: 1.0}", "write it as spec.algorithm.temperature"),
        ("algorithm: {steps: 1, beta: 0.1}", "did you mean klCoefficient?"),
        ("algorithm: {steps: 1, evalSteps: 5}", "write spec.evaluation.everySteps"),
        ("algorithm: {steps: 1, stop: x}", 'write ["x"]'),
        ("algorithm: {steps: 1, stop: ['']}", "stop[0]: expected the text that ends a response, such as </answer>"),
        ("algorithm: {steps: 1, top_p: 0.9}", "did you mean topP?"),
        ("algorithm: {steps: 1, topK: -1}", "expected a whole number from 0 to 1000000, found -1; write 0"),
        ("algorithm: {steps: 1, minP: 1}", "minP: expected a number of at least 0 and below 1, found 1"),
        ("algorithm: {steps: 1, dynamicSampling: {maxRounds: 0}}", "expected a whole number from 2 to 1000, found 0"),
        (
            "algorithm: {steps: 1, filter_groups: {enable: true, max_num_gen_batches: 9}}",
            "write algorithm.filter_groups.max_num",
        ),
        (
            "algorithm: {steps: 1, overlong_buffer: {len: 9}}",
            "write algorithm.overlong_buffer.len as spec.algorithm.over",
        ),
        ("algorithm: {steps: 1, adv_estimator: rloo}", "did you mean name?"),
        ("algorithm: {steps: 1, loss_type: dr_grpo}", "did you mean name? (and lossAggregation"),
        ("algorithm: {steps: 1, importance_sampling_level: sequence}", "did you mean name? (gspo for a ratio"),
        ("algorithm: {steps: 1, mask_truncated_completions: true}", "did you mean maskTruncated?"),
        ("algorithm: {steps: 1, lr_scheduler_type: cosine}", "write spec.algorithm.learningRateSchedule.name"),
        ("algorithm: {steps: 1, learningRateSchedule: cosine}", 'write learningRateSchedule: {name: "cosine"}'),
        ("algorithm: {steps: 1, learningRateSchedule: {name: cosin}}", "did you mean cosine?"),
        ("algorithm: {steps: 1, learningRateSchedule: {name: greedy}}", "the rate must follow from the step"),
        ("algorithm: {steps: 1, learningRateSchedule: {args: {a: 1}}}", "expected no arguments for the schedule"),
        ("policy: {lora: {r: 16}}", "did you mean rank?"),
        ("policy: {lora: {lora_alpha: 16}}", "did you mean alpha?"),
        ("policy: {optimizer: {lr: 1.0e-6}}", "write spec.algorithm.learningRate"),
        ("memory: {gradient_checkpointing: true}", "mean activationCheckpointing?"),
        ("memory: {gpu_memory_utilization: 0.9}", "did you mean kvCache? (an amount"),
        ("wandb: {project: x}", "did you mean tracking? (a list, as [{name: wandb}])"),
        ("resources: {}", "write spec.policy.template.spec.containers (resources"),
        ("nodeSelector: {}", "write spec.policy.template.spec.nodeSelector"),
        (
            "actor_rollout_ref: {rollout: {n: 8}, actor: {optim: {lr: 1.0e-6}}}",
            "write actor_rollout_ref.actor.optim.lr as spec.algorithm",
        ),
        ("actor_rollout_ref.rollout.n: 8", "write spec.algorithm.groupSize"),
        ("algorithm: {steps: 1, name: GRPO}", "did you mean grpo?"),
        ("algorithm: {steps: 1, name: GSPo}", f"or {list(ALGORITHMS)[-1]}, found"),
        ("algorithm: {steps: 1, name: Dr.GRPO}", "did you mean dr_grpo?"),
        ("algorithm: {steps: 1, name: reinforce++}", "write reinforce_plus_plus"),
        ("algorithm: {steps: 1, name: sapo}", "an own loss as algorithm.loss"),
        ("algorithm: {steps: 1, name: gspo, dualClip: 3.0}", "is not read by gspo, cispo: remove it"),
        ("algorithm: {steps: 1, loss: own.py:loss}", "must name a module, not a file"),
        ("algorithm: {steps: 1, lossAggregation: token-mean}", "did you mean TokenMean?"),
        ("algorithm: {steps: 1, lossAggregation: seq-mean-token-mean}", "write SequenceMean"),
        ("algorithm: {steps: 1, scaleAdvantages: false}", "write None"),
        ("algorithm: {steps: 1, scaleAdvantages: group}", "did you mean Group?"),
        ("algorithm: {steps: 1, importanceSampling: {mode: true}}", "write Truncate"),
        ("algorithm: {steps: 1, maxStaleness: 2}", "expected a whole number from 0 to 1, found 2"),
        ("algorithm: {steps: 1e6}", "write 1000000"),
        ("algorithm: {steps: 16.0}", "write 16"),
        ("algorithm: {steps: 08}", "write 8"),
        ("algorithm: {steps: 010}", "YAML reads 010 as the octal number 8: write 10"),
        ("algorithm: {steps: '1e3'}", "write 1000"),
        ("algorithm: {steps: '1,000'}", "write 1000"),
        ("algorithm: {steps: 10k}", "write 10000"),
        ("algorithm: {steps: 1_0k}", "expected a whole number"),
        ("algorithm: {steps: 1:30}", 'expected a whole number from 1 to 10000000, found "1:30"'),
        ("algorithm: {steps: yes}", "YAML reads yes as true"),
        ("algorithm: {steps:3}", "write a space after the colon: steps: 3"),
        ("algorithm: steps:3", "write a space after the colon: steps: 3"),
        ("model: {uri: 'hf://a/b', dtype: bf16}", "write bfloat16"),
        ("model: {uri: 'hf://a/b', dtype: auto}", "did you mean Auto?"),
        ("model: {uri: 'hf://a/b', dtype: float16}", "not supported: write bfloat16"),
        ("policy: {lora: true}", "write lora: {} for the defaults"),
        ("policy: {optimizer: adamw_8bit}", "write optimizer: {moments: int8}"),
        ("rollout: {quantization: fp8}", "write Fp8PerTensor"),
        ("rollout: {maxConcurrentSequences: auto}", "write Auto"),
        ("memory: {kvCache: auto}", "write Auto"),
        ("memory: {kvCache: 0.9}", "a share of the memory is not supported"),
        ("memory: {kvCache: 10 GB}", "write 10Gi or 10G"),
        ("memory: {microBatchTokens: 4k}", "write 4000"),
        ("memory: {emptyCache: no}", "write Disabled"),
        ("memory: {emptyCache: 'on'}", "did you mean"),
        ("gang: false", "write Disabled (YAML reads off and no as false)"),
        ("task: {name: digits, chatTemplate: false}", "write Never"),
        ("task: {name: no}", 'write "no", with quotes'),
        ("memory: {optimizerOffload: 0.5}", "write 50%"),
        ("memory: {optimizerOffload: 30}", "write 30%"),
        ("memory: {optimizerOffload: false}", "write Disabled"),
        ("task: {name: gsm8k}", "write dataset with args: {path: openai/gsm8k, name: main, promptField: question}"),
        ("task: {name: csv}", "write dataset with args: {path: FILE}"),
        ("task: {name: digits, chat_template_kwargs: {a: 1}}", "did you mean chatTemplateArgs?"),
        (
            "task: {name: digits, enable_thinking: false}",
            "did you mean chatTemplateArgs? (as {enable_thinking: false})",
        ),
        ("task: {name: digits, split: test}", "spec.task.args.split (with task.name: dataset)"),
        ("task: {name: digits, promptTemplate: {question}}", '"{question}"'),
        ("task: {name: digits, systemPrompt: 3}", 'write "3", with quotes'),
        ("env: [{name: A, value: 1}]", 'write "1", with quotes'),
        ("env: {A: b}", 'write [{name: A, value: "b"}]'),
        ("env: [A=b]", 'write {name: A, value: "b"}'),
        ("envFrom: {secretRef: {name: a}}", "write a dash before its first field"),
        ("algorithm: {steps: 1, maxStaleness: true}", "expected a whole number from 0 to 1, found true"),
        ("algorithm: {steps: 1, learningRate: 1,5e-6}", "write a decimal number with a point"),
        ("algorithm: {steps: '3,'}", "write 3"),
        ("memory: {kvCache: '1,5Gi'}", "write 1.5Gi"),
        ("model: {uri: \u201chf://a/b\u201d}", "replace the typographic character U+201C"),
        ("algorithm: {steps: 1, \xa0groupSize: 4}", "replace it by a space"),
        ("rollout: {engineArgs: {tensor-parallel-size: 2}}", "write spec.rollout.tensorParallelSize"),
        ("rollout: {engineArgs: {--max-num-seqs: 2}}", "write spec.rollout.maxConcurrentSequences"),
        ("memory: {kvCache: 80%}", "a share of the memory is not supported"),
        ("task: {name: digits, rewardTimeoutSeconds: 30s}", "write 30, in seconds"),
        ("ttlSecondsAfterFinished: 2h", "write 7200, in seconds"),
        ("task: {name: Digits}", "did you mean digits?"),
        ("task: {name: chain_sum}", "write reasoning-gym and args: {dataset: chain_sum}"),
        ("task: digits", 'write task: {name: "digits"}'),
        ("task: {name: jsonl, path: a, reward: 'a:b'}", "write it as spec.task.args.path"),
        ("task: {name: digits, files: {configMap: {name: x}}}", "write x"),
        ("model: 'hf://a/b'", 'write model: {uri: "hf://a/b"}'),
        ("checkpoint: {volume: claim}", "write volume: {persistentVolumeClaim: {claimName: claim}}"),
        ("trainer: {image: x, command: python train.py}", 'write ["python", "train.py"]'),
        ("policy: {lora: {targets: all-linear}}", "without targets, all linear layers get an adapter"),
        ("model: {uri: gpt2}", "write hf://ORGANIZATION/gpt2"),
        ("model: {uri: hf//a/b}", "did you mean hf://a/b?"),
        ("model: {uri: ' hf://a/b'}", "write hf://a/b, without white space around it"),
        ("trainer: {image: x, args: --fast}", 'write ["--fast"]'),
        ("suspend: 'True'", "remove the quotes"),
        ("suspend: Enabled", "write true"),
        ("trainer: {image: x, adapter: verl}", "did you mean Verl?"),
        ("checkpoint: {storageClassName: '{{ .Values.class }}'}", "a template that is not rendered: helm template"),
        ("checkpoint: {storageClassName: '${CLASS}'}", "a template that is not rendered: envsubst"),
        ("queueName: My_Queue", "write my-queue"),
        ("task: {name: digits, reward: rw.f}", "write rw:f"),
        ("task: {name: digits, reward: rw}", "write rw:FUNCTION"),
        ("task: {name: digits, reward: rw.py}", "write rw:FUNCTION"),
        ("task: {name: digits, reward: 'rw:f()'}", "write rw:f"),
        ("task: {name: digits, reward: 'rw.py:f'}", "write the module without .py"),
        ("task: {name: 'items.py:load', reward: 'rw:f'}", "write the module without .py"),
        ("task: {name: digits, reward: /abs/rw.py:f}", "write rw:f, with rw.py in the manifest's directory"),
        ("task: {name: digits, reward: src/rw.py:f}", "write src.rw:f"),
        ("task: {name: digits, reward: ./rw.py:f}", "write rw:f"),
        ("task: {name: digits, reward: my-rw:f}", "rename the file"),
        ("task: {name: digits, reward: {rw: f}}", "write rw:f"),
        ("task: {name: digits, reward: ['a:b', 'c:d']}", "write rewards: [{function: a:b}, {function: c:d}]"),
        ("model: {uri: Qwen/Qwen3-0.6B@main}", "did you mean hf://Qwen/Qwen3-0.6B@main?"),
        ("model: {uri: 'https://huggingface.co/Qwen/Qwen3-0.6B'}", "did you mean hf://Qwen/Qwen3-0.6B?"),
        ("model: {uri: 'https://huggingface.co/a/b/tree/v2'}", "did you mean hf://a/b@v2?"),
        ("model: {uri: 'hf:a/b'}", "did you mean hf://a/b?"),
        ("model: {uri: 'file:/models/q'}", "did you mean file:///models/q?"),
        ("model: {uri: 's3://bucket/q'}", "download the model to a directory"),
        ("model: {uri: 'C:\\models\\q'}", "write file:///mnt/c/models/q in WSL"),
        ("model: {uri: ghcr.io/org/model:1}", "did you mean oci://ghcr.io/org/model:1?"),
        ("model: {uri: /no/such/model}", "absolute path of an existing directory (/no/such/model does not exist)"),
        ("model: {uri: ~/no-such-model}", "no-such-model does not exist)"),
        ("model: {uri: 'hf://my org/model'}", "must not contain white space"),
    ],
)
def test_a_mistake_is_answered_with_what_to_write(spec: str, message: str, problems_of: ProblemsOf) -> None:
    """`message`: a part of the path, a colon, and the message."""
    problems = problems_of(manifest(spec))
    assert len({problem.line for problem in problems}) == 1
    assert problems[0].line is not None
    assert any(message in f"{problem.path.removeprefix('spec.')}: {problem.message}" for problem in problems), problems


@pytest.mark.parametrize("written", ["models/q", "./models/q", "../job/models/q"])
def test_a_relative_model_is_answered_with_its_absolute_uri(
    written: str, tmp_path: Path, problems_of: ProblemsOf, load: Callable[[str], RLJob]
) -> None:
    (tmp_path / "models" / "q").mkdir(parents=True)
    written = written.replace("/job/", f"/{tmp_path.name}/")
    (problem,) = problems_of(manifest(f"model: {{uri: {written}}}"))
    uri = problem.message.partition("did you mean ")[2].rstrip("?")
    assert uri == f"file://{tmp_path}/models/q"
    assert load(manifest(f"model: {{uri: '{uri}'}}")).spec.model.uri == uri


def test_a_name_is_answered_with_one_that_pods_can_have(problems_of: ProblemsOf) -> None:
    (problem,) = problems_of(manifest("retry: 0", "{name: My_Task}"))
    assert problem.message.endswith("; write my-task")
    (label,) = problems_of(manifest("retry: 0", "{name: job, labels: {on: yes}}"))
    assert (label.path, label.line) == ("metadata.labels.true", 3)
    assert 'write "yes", with quotes' in label.message


def test_a_pattern_with_a_backspace_is_explained(problems_of: ProblemsOf) -> None:
    (problem,) = problems_of(manifest(f"task: {{name: digits, answer: {{pattern: {json.dumps(chr(8) + '(x)')}}}}}"))
    assert "single quotes" in problem.message


def test_every_translation_is_a_field() -> None:
    schema: Schema = inlined_schema(RLJob)
    schema["properties"]["spec"]["properties"]["task"]["properties"]["args"] |= inlined_schema(DatasetArgs)
    for advice, names in OPTION_NAMES.items():
        path = tuple(advice.partition(" ")[0].split("."))
        if path[0] in ("spec", "metadata"):
            known = path if path[-3:-1] != ("template", "spec") else path[:-1]
            assert schema_at(known, schema), f"{names}: {advice}"


def test_no_field_of_the_api_is_taken_for_an_option_of_another_program() -> None:
    def names(schema: Schema) -> set[str]:
        below = schema.get("properties", {})
        return {*below, *(name for each in below.values() for name in names(each))}

    fields = {normalized(name) for name in names(inlined_schema(RLJob)["properties"]["spec"])}
    options = [normalized(name) for names in OPTION_NAMES.values() for name in names.split()]
    assert fields & set(options) == {"image"}
    assert len(options) == len(set(options))


def test_every_value_of_another_program_is_for_a_field_and_normalized() -> None:
    for field, values in OPTION_VALUES.items():
        schema = schema_at(tuple(field.split(".")), inlined_schema(RLJob))
        assert schema, field
        for value, advice in values.items():
            assert value == normalized(value)
            assert " " in advice or advice in schema.get("enum", [schema.get("const"), advice]), f"{field}: {advice}"
