"""Options of other programs are answered with RLJob's field, at its path, or with the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rljob_api.inlined_schema import Schema, inlined_schema
from rljob_api.job import RLJob
from rljob_api.manifest import Problem
from rljob_api.option_names import OPTION_NAMES, OPTION_VALUES, normalized
from rljob_api.problem_text import schema_at
from rljob_api.task_args import JsonlArgs

ProblemsOf = Callable[[str], list[Problem]]
HEAD = "apiVersion: rljob.dev/v1alpha1\nkind: RLJob\nmetadata: {name: job}\nspec:\n"


@pytest.mark.parametrize(
    ("spec", "path", "message"),
    [
        ("algorithm: {steps: 1, num_generations: 8}", "algorithm.num_generations", "did you mean groupSize?"),
        ("algorithm: {steps: 1, numGenerations: 8}", "algorithm.numGenerations", "did you mean groupSize?"),
        ("rollout: {n: 8}", "rollout.n", "write spec.algorithm.groupSize"),
        ("rollout: {temperature: 1.0}", "rollout.temperature", "write it as spec.algorithm.temperature"),
        ("algorithm: {steps: 1, beta: 0.1}", "algorithm.beta", "did you mean klCoefficient?"),
        (
            "algorithm: {steps: 1, evalSteps: 5}",
            "algorithm.evalSteps",
            "evaluation during training is not supported yet",
        ),
        ("algorithm: {steps: 1, stop: x}", "algorithm.stop", "stop strings are not supported yet"),
        ("algorithm: {steps: 1, topK: 5}", "algorithm.topK", "not supported: responses are sampled"),
        ("algorithm: {steps: 1, adv_estimator: rloo}", "algorithm.adv_estimator", "did you mean name? (grpo only"),
        ("policy: {lora: {r: 16}}", "policy.lora.r", "did you mean rank?"),
        ("policy: {lora: {lora_alpha: 16}}", "policy.lora.lora_alpha", "did you mean alpha?"),
        ("policy: {optimizer: {lr: 1.0e-6}}", "policy.optimizer.lr", "write spec.algorithm.learningRate"),
        ("memory: {gradient_checkpointing: true}", "memory.gradient_checkpointing", "mean activationCheckpointing?"),
        ("memory: {gpu_memory_utilization: 0.9}", "memory.gpu_memory_utilization", "did you mean kvCache? (an amount"),
        ("wandb: {project: x}", "wandb", "trackers are not supported yet"),
        ("resources: {}", "resources", "write spec.policy.template.spec.containers (resources"),
        ("nodeSelector: {}", "nodeSelector", "write spec.policy.template.spec.nodeSelector"),
        (
            "actor_rollout_ref: {rollout: {n: 8}, actor: {optim: {lr: 1.0e-6}}}",
            "actor_rollout_ref",
            "write actor_rollout_ref.rollout.n as spec.algorithm.groupSize, "
            "write actor_rollout_ref.actor.optim.lr as spec.algorithm.learningRate",
        ),
        ("actor_rollout_ref.rollout.n: 8", "actor_rollout_ref.rollout.n", "write spec.algorithm.groupSize"),
    ],
)
def test_an_option_of_another_program_is_translated(
    spec: str, path: str, message: str, problems_of: ProblemsOf
) -> None:
    required = {"model": "{uri: 'hf://a/b'}", "task": "{name: digits}", "algorithm": "{steps: 1}"}
    others = "".join(f"  {name}: {text}\n" for name, text in required.items() if not spec.startswith(f"{name}:"))
    found = {problem.path: problem for problem in problems_of(f"{HEAD}{others}  {spec}\n")}
    assert list(found) == [f"spec.{path}"]
    assert message in found[f"spec.{path}"].message
    assert found[f"spec.{path}"].line is not None


def test_every_translation_is_a_field() -> None:
    schema: Schema = inlined_schema(RLJob)
    schema["properties"]["spec"]["properties"]["task"]["properties"]["args"] |= inlined_schema(JsonlArgs)
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
