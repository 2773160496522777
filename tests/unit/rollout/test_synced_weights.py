from __future__ import annotations

import pytest

from rljob_trainer.rollout.synced_weights import SyncedWeights, WeightsNotSynced


def synced(version: int = 1) -> SyncedWeights:
    weights = SyncedWeights(["a", "b"])
    weights.begin()
    weights.receive(["a"])
    weights.receive(["b"])
    weights.complete(version)
    return weights


def test_weights_are_refused_before_the_first_sync() -> None:
    with pytest.raises(WeightsNotSynced, match="it has never received weights"):
        SyncedWeights(["a"]).require()


def test_a_complete_version_may_be_used() -> None:
    assert synced(7).require() == 7
    assert not synced().interrupted


def test_the_old_version_is_unusable_once_a_sync_starts() -> None:
    weights = synced()
    weights.begin()
    weights.receive(["a"])
    assert weights.interrupted
    with pytest.raises(WeightsNotSynced, match="did not complete"):
        weights.require()


def test_a_sync_without_all_weights_does_not_complete() -> None:
    weights = synced()
    weights.begin()
    weights.receive(["b", "unknown"])
    with pytest.raises(WeightsNotSynced, match="1 of 2 weights missing \\(a"):
        weights.complete(2)
    with pytest.raises(WeightsNotSynced):
        weights.require()


def test_weights_that_sleep_dropped_are_refused_until_the_next_sync() -> None:
    weights = synced()
    weights.drop()
    with pytest.raises(WeightsNotSynced, match="dropped when it went to sleep"):
        weights.require()
    assert not weights.interrupted, "nothing is half loaded"
