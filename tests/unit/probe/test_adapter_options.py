"""Options that the adapters compute from the changes of a memory plan, without TRL, hydra and verl.

`tests/integration/test_adapters.py` has the real programs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_probe.adapters import changes_of, divisor, trl, verl
from tests.unit.probe.probed_program import ProbedProgram

BATCH_SIZE = "per_device_train_batch_size"
SHARES = (1.0, 0.75, 0.5, 0.3, 0.25, 0.1, 0.01)


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 8, 12, 48])
def test_a_micro_batch_divides_the_one_of_the_user(batch: int) -> None:
    sizes = [divisor(batch, share) for share in SHARES]
    assert sizes == sorted(sizes, reverse=True)
    assert all(
        batch % size == 0 and 1 <= size <= max(batch * share, 1) for size, share in zip(sizes, SHARES, strict=True)
    )


class Arguments(SimpleNamespace):
    """A configuration as transformers' TrainingArguments."""

    def __init__(self, **options: Any) -> None:
        given = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_checkpointing": False}
        super().__init__(**given | options)
        self.__post_init__()

    def __post_init__(self) -> None:
        pass


class KTOConfig(Arguments):
    pass


def adapted(changes: dict[str, Any], config: Arguments) -> list[str]:
    return trl.adapt(config, changes_of(json.dumps(changes)), trl.Seen())


@pytest.mark.parametrize("share", SHARES)
def test_the_samples_of_a_step_stay(share: float) -> None:
    config = Arguments()
    adapted({"microBatchTokens": share}, config)
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 16


def engine(utilization: float) -> dict[str, Any]:
    return {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": utilization}


@pytest.mark.parametrize(
    ("changes", "given", "after", "line"),
    [
        ({"microBatchTokens": 0.5}, {BATCH_SIZE: 1}, {"gradient_accumulation_steps": 2}, f"{BATCH_SIZE} stays 1: "),
        ({"kvCache": 0.5}, {"use_vllm": False}, {}, "kvCache and rolloutSleep change nothing: there is no vLLM engine"),
        ({"emptyCache": True}, {}, {}, None),
        ({"kvCache": 0.01}, engine(0.3), engine(0.05), "vllm_gpu_memory_utilization 0.3 -> 0.05"),
        ({"kvCache": 0.5}, engine(0.04), engine(0.04), "vllm_gpu_memory_utilization 0.04"),
        ({"rolloutSleep": "Level1"}, engine(0.3), {}, "rolloutSleep is not possible: this version has no vllm_enable_"),
    ],
)
def test_options_are_changed_as_far_as_this_version_and_engine_have_them(
    changes: dict[str, Any], given: dict[str, Any], after: dict[str, Any], line: str | None
) -> None:
    config = Arguments(**given)
    lines = adapted(changes, config)
    assert vars(config).items() >= after.items()
    assert len(lines) == (line is not None)
    assert line is None or lines[0].startswith(line)


@pytest.mark.parametrize(
    ("before", "share", "after"), [(8, 0.1, 2), (9, 0.1, 3), (2, 0.5, 2), (12, 0.5, 6), (1, 0.5, 1)]
)
def test_kto_keeps_micro_batches_of_two_which_it_requires(before: int, share: float, after: int) -> None:
    config = KTOConfig(per_device_train_batch_size=before, gradient_accumulation_steps=3)
    adapted({"microBatchTokens": share}, config)
    assert config.per_device_train_batch_size == after
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 3 * before


def test_micro_batches_that_deepspeed_sets_stay(tmp_path: Path) -> None:
    """transformers raises ValueError if its arguments differ from the numbers in DeepSpeed's configuration."""
    fixed, auto = {"train_micro_batch_size_per_gpu": 8}, {"train_micro_batch_size_per_gpu": "auto"}
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({"gradient_accumulation_steps": 2}))
    for given, after in ((fixed, 8), (str(file), 8), (auto, 4), ("nowhere.json", 4), (None, 4)):
        config = Arguments(deepspeed=given)
        lines = adapted({"microBatchTokens": 0.5}, config)
        assert config.per_device_train_batch_size == after
        assert any("write auto there" in line for line in lines) == (after == 8)


@pytest.fixture
def arguments() -> type[Arguments]:
    return type("Arguments", (Arguments,), {})


CHANGES = {"microBatchTokens": 0.5, "kvCache": 0.5, "activationCheckpointing": True}


def test_every_configuration_of_a_script_is_adapted_once(arguments: type[Arguments]) -> None:
    """A script may train with one configuration and then with another that has the same batch."""
    for changes in ({"kvCache": 0.5, "activationCheckpointing": True}, CHANGES):
        trl.patch(SimpleNamespace(TrainingArguments=arguments), changes_of(json.dumps(changes)))
        arguments(use_vllm=False)
        second = arguments(**engine(0.4))
        assert (second.vllm_gpu_memory_utilization, second.gradient_checkpointing) == (0.2, True)
        assert vars(arguments(**vars(second))) == vars(second), "a copy is not adapted again"
        arguments.__post_init__ = Arguments.__post_init__  # type: ignore[method-assign]


def test_an_adapter_that_does_not_fit_ends_no_program(
    arguments: type[Arguments], capsys: pytest.CaptureFixture[str]
) -> None:
    trl.patch(SimpleNamespace(TrainingArguments=arguments), changes_of(json.dumps(CHANGES)))
    config = arguments(per_device_train_batch_size="8")
    assert config.per_device_train_batch_size == "8"
    assert "the adapter TRL does not fit this version" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("adapter", "changes", "reported"),
    [
        ("TRL", "[]", ""),
        ("TRL", "no JSON", ""),
        ("TRL", '{"microBatchTokens": "half"}', ""),
        ("TRL", '{"microBatchTokens": -1}', ""),
        ("TRL", "{}", ""),
        ("Other", '{"kvCache": 0.5}', "expected RLJOB_ADAPTER to be one of TRL, Verl, found Other"),
    ],
)
def test_no_adapter_and_no_changes_end_the_program(
    program: ProbedProgram, adapter: str, changes: str, reported: str
) -> None:
    run = program.run("print('trained')", environment={"RLJOB_ADAPTER": adapter, "RLJOB_ADAPTER_CHANGES": changes})
    assert (run.exit_code, run.output) == (0, "trained\n")
    assert reported in run.errors


# --- verl ---

ACTOR = "actor_rollout_ref.actor"


class FlatConf:
    """The calls of OmegaConf that the adapter makes, on a dict of dotted names."""

    @staticmethod
    def select(config: dict[str, Any], name: str) -> Any:
        section = {key[len(name) + 1 :]: value for key, value in config.items() if key.startswith(f"{name}.")}
        return config.get(name, section or None)

    @staticmethod
    def update(config: dict[str, Any], name: str, value: Any) -> None:
        config[name] = value

    @staticmethod
    def is_interpolation(section: Any, key: str) -> bool:
        return False


TOKENS, BATCH = "ppo_max_token_len_per_gpu", "ppo_micro_batch_size"
ENGINES = [("fsdp2", "fsdp_config"), *((name, name) for name in ("megatron", "veomni", "torchtitan"))]
SPLITTING = [
    ("ulysses_sequence_parallel_size", 1),
    ("ulysses_sequence_parallel_size", 4),
    ("fsdp_config.ulysses_sequence_parallel_size", 2),
    ("veomni.ulysses_parallel_size", 4),
    ("megatron.context_parallel_size", 8),
]
"""GPUs that hold a sequence together, the longest one of 32,768 tokens."""


def offloaded(value: bool, section: str) -> dict[str, Any]:
    return {f"{section}.optimizer_offload": value}


@pytest.mark.parametrize(
    ("changes", "actor", "after"),
    [
        *(
            ({"optimizerOffload": True}, {"strategy": strategy, **offloaded(False, section)}, offloaded(True, section))
            for strategy, section in [("fsdp", "fsdp_config"), *ENGINES]
        ),
        *(
            (
                {"microBatchTokens": 0.01},
                {"use_dynamic_bsz": True, option: gpus, TOKENS: 40_000},
                {TOKENS: 32_768 // gpus},
            )
            for option, gpus in SPLITTING
        ),
        *(
            ({"microBatchTokens": share}, {BATCH: 32}, {BATCH: samples})  # of all 8 GPUs, which keep a sequence each
            for share, samples in ((0.5, 16), (0.25, 8), (0.01, 8))
        ),
    ],
)
def test_the_options_of_verl_follow_its_engine(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], actor: dict[str, Any], after: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, "omegaconf", SimpleNamespace(OmegaConf=FlatConf))
    lengths = {"data.max_prompt_length": 1_024, "data.max_response_length": 31_744}
    given = {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 4} | lengths
    given |= {f"{ACTOR}.{name}": value for name, value in actor.items()}
    config = dict(given)
    verl.adapt(config, changes_of(json.dumps(changes)))
    changed = {name: value for name, value in config.items() if value != given[name]}
    assert changed == {f"{ACTOR}.{name}": value for name, value in after.items()}
