"""When the ladder ends, and what is then said: what was tried, what it brought, what to write instead."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat

import pytest

from rljob_memory.estimate import GIB
from rljob_memory.recovery import GiveUp, History, decide
from tests.unit.memory.recovery.failures import (
    ALL_OFF,
    FACTS,
    FIRST_PLAN,
    IN_THE_OPERATOR,
    NOTHING_YET,
    change_of,
    diagnosis,
    failure,
    latitude,
    remedies_of,
)
from tests.unit.memory.recovery.questions import PINNABLE, settings_that_pin

SPIKE = failure(diagnosis("ActivationSpike", requested_bytes=2 * GIB, free_bytes=0), step=41)


def test_the_account_names_every_change_and_what_was_expected_and_seen_of_it() -> None:
    remedies, _ = remedies_of([SPIKE] * 2, FIRST_PLAN, latitude(IN_THE_OPERATOR))
    first, second = (change_of(SPIKE, remedy) for remedy in remedies)
    seen = first.model_copy(update={"remedy": first.remedy.model_copy(update={"observed_bytes": 3 * GIB})})
    given = latitude(IN_THE_OPERATOR, recovery={"maxAdjustments": 2})
    end = decide(SPIKE, remedies[-1].plan, History((seen, second), adjustments=2, committed_step=40), given)
    assert isinstance(end, GiveUp)
    assert end.reason == "AdjustmentsExhausted"
    assert "recovery.maxAdjustments is 2" in end.sentence
    first_line, second_line = end.sentence.partition("Tried: ")[2].split(";")[:2]
    assert first_line.startswith("generation 2 (step 41, update, ActivationSpike): microBatchTokens 16384 → 8192")
    assert first_line.endswith("observed 3.00 GiB")
    assert "generation 3" in second_line
    assert "failed again" in second_line
    assert "Raise recovery.maxAdjustments" in end.sentence
    assert "Lower memory.microBatchTokens" in end.sentence


def test_a_pinned_setting_in_the_way_is_named_with_the_value_to_write() -> None:
    every_pin = replace(latitude(), settings=settings_that_pin(PINNABLE - {"micro_batch_tokens"}))
    plan = FIRST_PLAN.model_copy(update={"micro_batch_tokens": 612})
    end = decide(SPIKE, plan, NOTHING_YET, every_pin)
    assert isinstance(end, GiveUp)
    assert end.reason == "PinnedSettingConflict"
    assert "memory.activationCheckpointing is pinned to Disabled: write Enabled, or Auto" in end.sentence


def test_a_pinned_size_is_said_as_it_is_written() -> None:
    only_kv = latitude(memory={"kvCache": "40Gi", "optimizerOffload": "Disabled", "emptyCache": "Disabled"})
    too_large = failure(diagnosis("KVCacheOversized", 0.9), role="rollout", phase="rollout")
    _, end = remedies_of(repeat(too_large, 99), ALL_OFF.model_copy(update={"expandable_segments": True}), only_kv)
    assert end is not None
    assert "memory.kvCache is pinned to 40960Mi: write 30720Mi, or Auto" in end.sentence


def test_kept_graphs_end_the_job_at_once_where_their_only_remedy_is_pinned() -> None:
    pinned = latitude(memory={"detachMetrics": "Disabled"})
    grown = failure(diagnosis("RetainedGraph"), diagnosis("ActivationSpike", 0.5))
    end = decide(grown, FIRST_PLAN.model_copy(update={"detach_metrics": False}), NOTHING_YET, pinned)
    assert isinstance(end, GiveUp)
    assert end.reason == "PinnedSettingConflict"
    assert "memory.detachMetrics is pinned to Disabled: write Enabled, or Auto" in end.sentence


def test_a_plan_that_is_to_stay_stays() -> None:
    end = decide(SPIKE, FIRST_PLAN, NOTHING_YET, latitude(memory={"mode": "Disabled"}))
    assert isinstance(end, GiveUp)
    assert "Write memory.mode: Auto" in end.sentence
    assert "No change of the plan was tried" in end.sentence


def test_a_loop_without_a_step_ends_however_large_the_budget_is() -> None:
    short = FACTS.model_copy(update={"longest_sequence_tokens": 4})
    given = latitude(facts=short, recovery={"maxAdjustments": 100})
    remedies, end = remedies_of(repeat(SPIKE, 99), FIRST_PLAN, given)
    assert len(remedies) == 10
    assert end is not None
    assert end.reason == "NoProgress"
    remedies, end = remedies_of(repeat(SPIKE, 99), FIRST_PLAN, given, committed_each_time=50)
    assert len(remedies) > 10
    assert end is not None
    assert end.reason == "NothingLeft", "with steps in between it goes on as long as there is something to change"


@pytest.mark.parametrize(
    ("recovery", "line"),
    [
        ({}, "recovery.maxHostMemory is absent, so the limit of 4.00 GiB stays: write 6144Mi"),
        ({"maxHostMemory": "4Gi"}, "recovery.maxHostMemory is 4.00 GiB: write 6144Mi"),
    ],
)
def test_a_bound_in_the_way_is_named_with_the_value_to_write(recovery: dict[str, str], line: str) -> None:
    killed = failure(diagnosis("HostMemory"))
    end = decide(killed, FIRST_PLAN, NOTHING_YET, latitude(host_memory_limit_bytes=4 * GIB, recovery=recovery))
    assert isinstance(end, GiveUp)
    assert end.reason == "NothingLeft"
    assert line in end.sentence


def test_the_account_of_the_longest_history_fits_a_condition() -> None:
    remedy = remedies_of([SPIKE], FIRST_PLAN, latitude())[0][0]
    changes = (change_of(SPIKE, remedy),) * 20
    end = decide(SPIKE, FIRST_PLAN, History(changes, adjustments=6), latitude())
    assert isinstance(end, GiveUp)
    assert len(end.sentence) < 8_000
