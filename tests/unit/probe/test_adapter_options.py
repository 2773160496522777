"""Options that the adapters compute from the changes of a memory plan."""

from __future__ import annotations

import json
from pathlib import Path
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
    return config, trl.adapt(config, changes_of(json.dumps(changes)), trl.Seen())


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


def test_a_small_engine_never_grows() -> None:
    engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.04}
    config, _ = adapted({"kvCache": 0.5}, **engine)
    assert config.vllm_gpu_memory_utilization == 0.04


def test_a_version_without_the_sleep_mode_is_named() -> None:
    engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
    _, lines = adapted({"rolloutSleep": "Level1"}, **engine)
    assert lines == ["rolloutSleep is not possible: this version has no vllm_enable_sleep_mode"]


@pytest.mark.parametrize(
    ("before", "share", "after"), [(8, 0.1, 2), (9, 0.1, 3), (2, 0.5, 2), (12, 0.5, 6), (1, 0.5, 1)]
)
def test_kto_keeps_micro_batches_of_two_which_it_requires(before: int, share: float, after: int) -> None:
    class KTOConfig(SimpleNamespace):
        pass

    config = KTOConfig(per_device_train_batch_size=before, gradient_accumulation_steps=3)
    trl.adapt(config, changes_of(json.dumps({"microBatchTokens": share})), trl.Seen())
    assert config.per_device_train_batch_size == after
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 3 * before


def test_micro_batches_that_deepspeed_sets_stay(tmp_path: Path) -> None:
    """transformers raises ValueError if its arguments differ from the numbers in DeepSpeed's configuration."""
    fixed, auto = {"train_micro_batch_size_per_gpu": 8}, {"train_micro_batch_size_per_gpu": "auto"}
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({"gradient_accumulation_steps": 2}))
    for given, after in ((fixed, 8), (str(file), 8), (auto, 4), ("nowhere.json", 4), (None, 4)):
        config, lines = adapted({"microBatchTokens": 0.5}, deepspeed=given)
        assert config.per_device_train_batch_size == after
        assert any("write auto there" in line for line in lines) == (after == 8)


class Arguments(SimpleNamespace):
    """A configuration as transformers' TrainingArguments."""

    def __init__(self, **options: Any) -> None:
        given = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_checkpointing": False}
        super().__init__(**given | options)
        self.__post_init__()

    def __post_init__(self) -> None:
        pass


@pytest.fixture
def arguments() -> type[Arguments]:
    return type("Arguments", (Arguments,), {})


ENGINE = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4}
CHANGES = {"microBatchTokens": 0.5, "kvCache": 0.5, "activationCheckpointing": True}


def test_every_configuration_of_a_script_is_adapted(arguments: type[Arguments]) -> None:
    """A script may train with one configuration and then with another that has the same batch."""
    for changes in ({"kvCache": 0.5, "activationCheckpointing": True}, CHANGES):
        trl.patch(SimpleNamespace(TrainingArguments=arguments), changes_of(json.dumps(changes)))
        arguments(use_vllm=False)
        second = arguments(**ENGINE)
        assert (second.vllm_gpu_memory_utilization, second.gradient_checkpointing) == (0.2, True)
        arguments.__post_init__ = Arguments.__post_init__  # type: ignore[method-assign]


def test_a_copy_of_a_configuration_is_not_adapted_again(arguments: type[Arguments]) -> None:
    trl.patch(SimpleNamespace(TrainingArguments=arguments), changes_of(json.dumps(CHANGES)))
    first = arguments(**ENGINE)
    assert vars(arguments(**vars(first))) == vars(first)


def test_an_adapter_that_does_not_fit_ends_no_program(
    arguments: type[Arguments], capsys: pytest.CaptureFixture[str]
) -> None:
    trl.patch(SimpleNamespace(TrainingArguments=arguments), changes_of(json.dumps(CHANGES)))
    config = arguments(per_device_train_batch_size="8")
    assert config.per_device_train_batch_size == "8"
    assert "the adapter TRL does not fit this version" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "no JSON", '{"microBatchTokens": "half"}', '{"microBatchTokens": -1}', "{}"])
def test_changes_of_another_form_never_end_the_program(program: ProbedProgram, text: str) -> None:
    run = program.run("print('trained')", environment={"RLJOB_ADAPTER": "TRL", "RLJOB_ADAPTER_CHANGES": text})
    assert (run.exit_code, run.output) == (0, "trained\n")


def test_an_unknown_adapter_is_reported(program: ProbedProgram) -> None:
    environment = {"RLJOB_ADAPTER": "Other", "RLJOB_ADAPTER_CHANGES": '{"microBatchTokens": 0.5}'}
    run = program.run("print('trained')", environment=environment)
    assert run.output == "trained\n"
    assert "expected RLJOB_ADAPTER to be one of TRL, Verl, found Other" in run.errors
