"""The fast path of log-probabilities, without an engine. Whether its values are vLLM's: test_rollout_weight_sync."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rljob_trainer.rollout.fast_logprobs import VARIABLE, SampledLogprobs, install_fast_logprobs


class Scheduler:
    """Gives each sequence its part of the log-probabilities, as vLLM's does."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        return model_runner_output.logprobs and model_runner_output.logprobs.slice_request(scheduler_output, 1)


class OutputProcessor:
    """Records the outputs that reach vLLM's own code."""

    def __init__(self, log_stats: bool = False) -> None:
        self.log_stats = log_stats
        self.request_states: dict[str, Any] = {}
        self.received: list[Any] = []

    def process_outputs(self, outputs: Sequence[Any], engine_core_timestamp: float | None = None) -> float | None:
        self.received += outputs
        return engine_core_timestamp


def llm_with(processor: OutputProcessor, *, in_process: bool = True) -> Any:
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=Scheduler())) if in_process else SimpleNamespace()
    return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core, output_processor=processor))


def pretend_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Set the version of a vLLM that is not imported."""
    lists = SimpleNamespace(_fields=("ids", "logprobs", "ranks", "cu_num_generated_tokens"))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    monkeypatch.setitem(sys.modules, "vllm.v1", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.v1.outputs", SimpleNamespace(LogprobsLists=lists))


@pytest.mark.parametrize(
    ("version", "environment", "log_stats", "in_process"),
    [
        ("0.26.1", {VARIABLE: "0"}, False, True),
        ("0.33.0", {}, False, True),
        ("0.26.1", {}, True, True),
        ("0.26.1", {}, False, False),
    ],
    ids=["disabled", "unknown version", "statistics of every token", "engine in another process"],
)
def test_otherwise_all_tokens_take_the_path_of_vllm(
    monkeypatch: pytest.MonkeyPatch, version: str, environment: dict[str, str], log_stats: bool, in_process: bool
) -> None:
    pretend_version(monkeypatch, version)
    llm = llm_with(processor := OutputProcessor(log_stats), in_process=in_process)
    assert not install_fast_logprobs(llm, environment)
    assert "process_outputs" not in vars(processor)


def test_a_sequence_gets_the_first_column_of_its_rows() -> None:
    values = np.asarray([[-0.1, -9], [-0.2, -9], [-0.3, -9]], np.float32)
    one_each = SampledLogprobs(SimpleNamespace(logprobs=values, cu_num_generated_tokens=None))
    assert one_each.slice_request(1, 1) == [float(np.float32(-0.2))]
    assert one_each.slice_request(2, 0) == [], "its prompt is not prefilled yet"
    several = SampledLogprobs(SimpleNamespace(logprobs=values, cu_num_generated_tokens=[0, 2, 3]))
    assert several.slice_request(0, 2) == values[:2, 0].tolist()
    assert several.slice_request(1, 1) == values[2:, 0].tolist()


def request(*, prefilling: bool = False) -> Any:
    return SimpleNamespace(
        is_prefilling=prefilling,
        detokenizer=SimpleNamespace(token_ids=[7]),
        logprobs_processor=SimpleNamespace(logprobs=SimpleNamespace(logprobs=[-0.5])),
    )


def output(name: str, reason: str | None = None) -> Any:
    return SimpleNamespace(request_id=name, new_token_ids=[8], new_logprobs=[-0.25], finish_reason=reason)


def test_only_first_and_last_tokens_reach_the_code_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_version(monkeypatch, "0.32.0+cpu")
    processor = OutputProcessor()
    processor.request_states |= {"first": request(prefilling=True), "middle": request(), "last": request()}
    llm = llm_with(processor)
    assert install_fast_logprobs(llm, {})
    outputs = [output("first"), output("middle"), output("last", "stop"), output("aborted")]
    assert processor.process_outputs(outputs, engine_core_timestamp=3.0) == 3.0

    assert [each.request_id for each in processor.received] == ["first", "last", "aborted"]
    assert [each.new_logprobs for each in processor.received[:2]] == [None, None], "they are not counted twice"
    states = processor.request_states.values()
    assert [state.logprobs_processor.logprobs.logprobs for state in states] == [[-0.5, -0.25]] * 3
    assert [state.detokenizer.token_ids for state in states] == [[7], [7, 8], [7]]


def test_a_step_without_log_probabilities_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_version(monkeypatch, "0.26.0")
    llm = llm_with(OutputProcessor())
    assert install_fast_logprobs(llm, {})
    update = llm.llm_engine.engine_core.engine_core.scheduler.update_from_output
    assert update(0, SimpleNamespace(logprobs=None)) is None
    lists = SimpleNamespace(logprobs=np.asarray([[-1.0]], np.float32), cu_num_generated_tokens=None)
    assert update(0, SimpleNamespace(logprobs=lists)) == [-1.0]
