"""Giving up: the reason, all changes that were tried, and the values to set."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat
from typing import Any

import pytest

from rljob_memory.recovery import Changed, GiveUp, RecoveryState, Restart
from rljob_memory.sizes import GIB
from tests.unit.memory.recovery.failures import (
    ALL_OFF,
    FACTS,
    FIRST_PLAN,
    IN_THE_OPERATOR,
    ON_ONE_MACHINE,
    answer,
    answers_to,
    constraints,
    diagnosis,
    explanation_of,
    failure,
)
from tests.unit.memory.recovery.questions import PINNABLE, settings_that_pin

SPIKE = failure(diagnosis("ActivationSpike", requested_bytes=2 * GIB, free_bytes=0), step=41)


def test_the_explanation_names_every_change_with_its_effect() -> None:
    remedies, _ = answers_to([SPIKE] * 2, FIRST_PLAN, constraints(IN_THE_OPERATOR))
    first, second = (each.change for each in remedies)
    seen = first.model_copy(update={"remedy": first.remedy.model_copy(update={"observed_bytes": 3 * GIB})})
    given = constraints(IN_THE_OPERATOR, recovery={"maxAdjustments": 2})
    state = RecoveryState(None, 1_000, (seen, second), adjustments=2, committed_step=40)
    end = answer(SPIKE, remedies[-1].plan, given, state)
    assert isinstance(end, GiveUp)
    assert end.reason == "AdjustmentsExhausted"
    assert "recovery.maxAdjustments is 2" in explanation_of(end)
    first_line, second_line = end.explanation.partition("Tried: ")[2].split(";")[:2]
    assert first_line.startswith("generation 2 (step 41, update, ActivationSpike): microBatchTokens 16384 → 8192")
    assert first_line.endswith("observed 3.00 GiB")
    assert "generation 3" in second_line
    assert "failed again" in second_line
    assert "Raise recovery.maxAdjustments" in explanation_of(end)
    assert "Lower memory.microBatchTokens" in explanation_of(end)


def test_a_pinned_setting_that_prevents_a_change_is_named() -> None:
    every_pin = replace(constraints(), settings=settings_that_pin(PINNABLE - {"micro_batch_tokens"}))
    plan = FIRST_PLAN.model_copy(update={"micro_batch_tokens": 612})
    end = answer(SPIKE, plan, every_pin)
    assert isinstance(end, GiveUp)
    assert end.reason == "PinnedSettingConflict"
    assert "memory.activationCheckpointing is pinned to Disabled: write Enabled, or Auto" in explanation_of(end)


def test_a_pinned_size_is_named_as_in_the_manifest() -> None:
    only_kv = constraints(memory={"kvCache": "40Gi", "optimizerOffload": "Disabled", "emptyCache": "Disabled"})
    too_large = failure(diagnosis("KVCacheOversized", 0.9), role="rollout", phase="rollout")
    _, end = answers_to(repeat(too_large, 99), ALL_OFF.model_copy(update={"expandable_segments": True}), only_kv)
    assert end is not None
    assert "memory.kvCache is pinned to 40Gi: write 30Gi, or Auto" in explanation_of(end)


def test_retained_graphs_are_given_up_if_their_remedy_is_pinned() -> None:
    pinned = constraints(memory={"detachMetrics": "Disabled"})
    grown = failure(diagnosis("RetainedGraph"), diagnosis("ActivationSpike", 0.5))
    end = answer(grown, FIRST_PLAN.model_copy(update={"detach_metrics": False}), pinned)
    assert isinstance(end, GiveUp)
    assert end.reason == "PinnedSettingConflict"
    assert "memory.detachMetrics is pinned to Disabled: write Enabled, or Auto" in explanation_of(end)


def test_a_disabled_memory_mode_keeps_the_plan() -> None:
    end = answer(SPIKE, FIRST_PLAN, constraints(ON_ONE_MACHINE, memory={"mode": "Disabled"}))
    assert isinstance(end, GiveUp)
    assert "Write memory.mode: Auto" in explanation_of(end)
    assert "No change of the memory plan was tried" in explanation_of(end)


def test_a_loop_without_a_step_ends_however_large_the_budget_is() -> None:
    short = FACTS.model_copy(update={"longest_sequence_tokens": 4})
    given = constraints(profile=short, recovery={"maxAdjustments": 100})
    remedies, end = answers_to(repeat(SPIKE, 99), FIRST_PLAN, given)
    assert len(remedies) == 10
    assert isinstance(end, GiveUp)
    assert end.reason == "NoProgress"
    remedies, end = answers_to(repeat(SPIKE, 99), FIRST_PLAN, given, committed_each_time=50)
    assert len(remedies) > 10
    assert "No change of the memory plan is left" in explanation_of(end), "with progress it ends only then"


@pytest.mark.parametrize(
    ("recovery", "line"),
    [
        ({}, "recovery.maxHostMemory is absent, so the limit of 4.00 GiB stays: write 6Gi"),
        ({"maxHostMemory": "4Gi"}, "recovery.maxHostMemory is 4.00 GiB: write 6Gi"),
    ],
)
def test_a_bound_that_prevents_a_change_is_named_with_a_value(recovery: dict[str, str], line: str) -> None:
    killed = failure(diagnosis("HostMemory"))
    end = answer(killed, FIRST_PLAN, constraints(host_memory_limit_bytes=4 * GIB, recovery=recovery))
    assert isinstance(end, Restart), "new pods may run where there is more"
    assert line in explanation_of(end)


def test_a_predicted_limit_is_doubled_at_most_unless_a_bound_is_set() -> None:
    killed = failure(diagnosis("HostMemory", needed_bytes=100 * GIB))
    predicted: dict[str, Any] = {"host_memory_limit_bytes": 4 * GIB, "predicted_host_memory_limit_bytes": 4 * GIB}
    for recovery, most in (({}, 8 * GIB), ({"maxHostMemory": "5Gi"}, 5 * GIB)):
        changed = answer(killed, FIRST_PLAN, constraints(recovery=recovery, **predicted))
        assert isinstance(changed, Changed)
        assert changed.state.plan is not None
        assert changed.state.plan.host_memory_bytes == most


def test_the_longest_explanation_fits_a_condition() -> None:
    remedy = answers_to([SPIKE], FIRST_PLAN, constraints())[0][0]
    changes = (remedy.change,) * 20
    end = answer(SPIKE, FIRST_PLAN, constraints(), RecoveryState(None, 1_000, changes, adjustments=6))
    assert isinstance(end, GiveUp)
    assert len(end.explanation) < 8_000
