"""When decoding steps take the fast path, without an engine. integration/test_decoding_steps compares its steps."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_trainer.rollout.fast_decoding import VARIABLE, install_fast_decoding


class Scheduler:
    dcp_world_size = num_sampled_tokens_per_step = 1
    log_stats = False

    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)

    def schedule(self) -> None:
        """Left in its place."""


def llm_with(scheduler: Scheduler, *, in_process: bool = True) -> Any:
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler)) if in_process else SimpleNamespace()
    return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))


@pytest.mark.parametrize(
    ("version", "scheduler", "in_process", "reason"),
    [
        ("0.33.0", Scheduler(), True, "vLLM 0.33.0 is not among the known versions"),
        ("0.26.1", Scheduler(), False, "the engine runs in another process"),
        ("0.26.1", Scheduler(log_stats=True), True, "the scheduler has log_stats"),
        ("0.26.1", Scheduler(num_spec_tokens=3, num_lookahead_tokens=3), True, "num_spec_tokens, num_lookahead_tokens"),
        ("0.26.1", Scheduler(dcp_world_size=2), True, "one token in each step on each GPU"),
    ],
)
def test_other_engines_keep_the_scheduler_of_vllm_and_log_why(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    scheduler: Scheduler,
    in_process: bool,
    reason: str,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    assert not install_fast_decoding(llm_with(scheduler, in_process=in_process))
    assert "schedule" not in vars(scheduler)
    assert reason in caplog.text


def test_the_variable_disables_it_silently(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    assert not install_fast_decoding(llm_with(Scheduler()))
    assert not caplog.text
