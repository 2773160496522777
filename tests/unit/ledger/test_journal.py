from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_client.errors import OutputUnavailable
from rljob_trainer.ledger.journal import RolloutJournal
from tests.unit.ledger.samples import rollout_batch


@pytest.fixture
def journal(tmp_path: Path) -> RolloutJournal:
    return RolloutJournal(tmp_path / "journal")


def test_saved_rollouts_come_back_bit_for_bit(journal: RolloutJournal) -> None:
    saved = rollout_batch(7)
    journal.save(saved)
    loaded = journal.load(7)
    assert journal.has(7)
    assert loaded.group_size == saved.group_size
    for name in ("prompt_ids", "response_ids", "rollout_logprobs", "finished", "rewards", "advantages"):
        for ours, theirs in zip(getattr(loaded, name), getattr(saved, name), strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=name)


def test_a_step_that_was_never_saved_is_absent(journal: RolloutJournal) -> None:
    journal.save(rollout_batch(7))
    assert not journal.has(8)


@settings(max_examples=40)
@given(kept=st.floats(min_value=0, max_value=1, exclude_max=True))
def test_a_file_torn_at_any_byte_counts_as_absent(tmp_path_factory: pytest.TempPathFactory, kept: float) -> None:
    journal = RolloutJournal(tmp_path_factory.mktemp("journal"))
    journal.save(rollout_batch(3))
    (path,) = journal.directory.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    assert not journal.has(3)


def test_a_flipped_bit_in_the_tokens_counts_as_absent(journal: RolloutJournal) -> None:
    journal.save(rollout_batch(3, response_tokens=100))
    (path,) = journal.directory.iterdir()
    content = bytearray(path.read_bytes())
    content[content.index(np.arange(50, 60, dtype=np.int32).tobytes())] ^= 1
    path.write_bytes(content)
    assert not journal.has(3)


def test_a_file_of_another_step_counts_as_absent(journal: RolloutJournal) -> None:
    journal.save(rollout_batch(3))
    (path,) = journal.directory.iterdir()
    path.rename(path.with_name("step-000004.npz"))
    assert not journal.has(4)
    with pytest.raises(OutputUnavailable, match=r"committed step 4 .* found the file of step 3"):
        journal.load(4)


def test_missing_rollouts_of_a_committed_step_are_an_error_with_the_file(journal: RolloutJournal) -> None:
    with pytest.raises(OutputUnavailable, match=r"committed step 5 in .*step-000005\.npz, found the file missing"):
        journal.load(5)


def test_corrupt_rollouts_of_a_committed_step_are_an_error_with_advice(journal: RolloutJournal) -> None:
    journal.save(rollout_batch(5))
    (path,) = journal.directory.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(OutputUnavailable, match=r"found the file corrupt.*Restore the file.*another --output"):
        journal.load(5)


def test_discarding_keeps_the_steps_after(journal: RolloutJournal) -> None:
    for step in (1, 2, 3):
        journal.save(rollout_batch(step))
    (journal.directory / "step-000002.npz.partial").write_bytes(b"torn")
    journal.discard_through(2)
    assert [path.name for path in journal.directory.iterdir()] == ["step-000003.npz"]
