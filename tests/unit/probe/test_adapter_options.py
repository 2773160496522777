"""Options that the adapters compute from the changes of a memory plan."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_probe.adapters import trl
from rljob_probe.adapters.changes import changes_of, divisor
from tests.unit.probe.probed_program import ProbedProgram

SHARES = (1.0, 0.75, 0.5, 0.3, 0.25, 0.1, 0.01)


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 8, 12, 48])
def test_a_micro_batch_divides_the_one_of_the_user(batch: int) -> None:
    sizes = [divisor(batch, share) for share in SHARES]
    assert sizes == sorted(sizes, reverse=True)
    assert all(
        batch % size == 0 and 1 <= size <= max(batch * share, 1) for size, share in zip(sizes, SHARES, strict=True)
    )


def adapted(changes: dict[str, Any], **options: Any) -> tuple[SimpleNamespace, list[str]]:
    given = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_checkpointing": False}
    config = SimpleNamespace(**given | options)
    return config, trl.adapt(config, changes_of(json.dumps(changes)))


@pytest.mark.parametrize("share", SHARES)
def test_the_samples_of_a_step_stay(share: float) -> None:
    config, _ = adapted({"microBatchTokens": share})
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 16


def test_a_micro_batch_of_one_sample_stays_and_the_log_says_so() -> None:
    config, lines = adapted({"microBatchTokens": 0.5}, per_device_train_batch_size=1)
    assert config.gradient_accumulation_steps == 2
    assert lines == ["per_device_train_batch_size stays 1: a micro-batch cannot be smaller"]


def test_without_an_engine_its_settings_are_named() -> None:
    _, lines = adapted({"kvCache": 0.5}, use_vllm=False)
    assert lines == ["kvCache and rolloutSleep change nothing: there is no vLLM engine on the trainer's GPUs"]


def test_options_that_a_version_lacks_are_left_out() -> None:
    _, lines = adapted({"emptyCache": True})
    assert lines == []


def test_an_engine_keeps_a_part_of_the_gpu() -> None:
    engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
    config, _ = adapted({"kvCache": 0.01}, **engine)
    assert config.vllm_gpu_memory_utilization == 0.05


@pytest.mark.parametrize("text", ["[]", "no JSON", '{"microBatchTokens": "half"}', '{"microBatchTokens": -1}', "{}"])
def test_changes_of_another_form_never_end_the_program(program: ProbedProgram, text: str) -> None:
    run = program.run("print('trained')", environment={"RLJOB_ADAPTER": "TRL", "RLJOB_ADAPTER_CHANGES": text})
    assert (run.exit_code, run.output) == (0, "trained\n")


def test_an_unknown_adapter_is_reported(program: ProbedProgram) -> None:
    environment = {"RLJOB_ADAPTER": "Other", "RLJOB_ADAPTER_CHANGES": '{"microBatchTokens": 0.5}'}
    run = program.run("print('trained')", environment=environment)
    assert run.output == "trained\n"
    assert "expected RLJOB_ADAPTER to be one of TRL, Verl, found Other" in run.errors
