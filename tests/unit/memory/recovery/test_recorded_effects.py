"""Expected effects of changes, compared with measurements of a job that ran out of memory on an H200.

The job has 4 layers of Qwen3-0.6B's shape, not compiled, and learns from 256 sequences of 257 tokens at once.
"""

from __future__ import annotations

import pytest

from rljob_memory.recovery import profile_of
from rljob_memory.workload import ModelShape, Workload
from tests.unit.memory.recovery.failures import FIRST_PLAN, H200, change_after, constraints, diagnosis, failure

FOUR_LAYERS = ModelShape(
    218_507_264, layers=4, hidden=1024, kv_heads=8, head_dim=128, vocabulary=151_936, bytes_per_parameter=2
)
ROLLOUTS = Workload(16, 16, max_prompt_tokens=16, max_response_tokens=256)
FACTS = profile_of(H200, FOUR_LAYERS, ROLLOUTS, fused=False)
WHOLE_STEP = FIRST_PLAN.model_copy(update={"micro_batch_tokens": 131_072})

PEAK_WITH_16384_TOKENS, PEAK_WITH_8192_TOKENS = 90_457_448_960, 60_895_002_624
"""Bytes allocated, and reserved, in an update with so many tokens' logits at a time."""


def test_logits_that_did_not_fit_in_the_backward_pass() -> None:
    spike = diagnosis(
        "ActivationSpike",
        requested_bytes=19_917_910_835,
        free_bytes=19_166_291_558,
        allocated_bytes=127_753_802_220,
    )
    plan = WHOLE_STEP.model_copy(update={"logprob_chunk_tokens": 32_768})
    remedy = change_after(failure(spike), plan, constraints(profile=FACTS))
    assert (remedy.change.remedy.setting, remedy.change.remedy.after) == ("logprobChunkTokens", "8192")
    assert remedy.change.remedy.expected_bytes == pytest.approx(87_554_806_252, rel=0.05)


def test_a_failure_before_the_peak_shows_only_a_part_of_it() -> None:
    """In the forward pass three tensors of the logits' size existed, and the fourth was requested."""
    spike = diagnosis(
        "ActivationSpike", requested_bytes=39_825_084_252, free_bytes=5_272_072_356, allocated_bytes=142_034_568_479
    )
    plan = WHOLE_STEP.model_copy(update={"logprob_chunk_tokens": 131_072})
    remedy = change_after(failure(spike), plan, constraints(profile=FACTS))
    assert remedy.change.remedy.after == "17408"
    had_come_to = 142_034_568_479 + 39_825_084_252
    assert remedy.change.remedy.expected_bytes == pytest.approx(had_come_to - PEAK_WITH_16384_TOKENS, rel=0.1)
    assert 52_224 * FACTS.logits_bytes_per_token > had_come_to, "the whole peak would have been more than the card"


def test_twice_the_tokens_take_twice_the_logits() -> None:
    more_logits = 8_192 * FACTS.logits_bytes_per_token
    assert more_logits == pytest.approx(PEAK_WITH_16384_TOKENS - PEAK_WITH_8192_TOKENS, rel=0.15)


def test_the_activations_of_a_whole_step() -> None:
    """Allocated memory at the end of the forward pass, without three tensors of logits, weights and moments."""
    logits = 65_536 * 4 * 151_936
    kept = 142_034_568_479 - 3 * logits - 2_622_636_544
    assert 256 * 257 * FACTS.activation_bytes_per_token == pytest.approx(kept, rel=0.1)


def test_a_bucket_of_all_weights_is_there_twice() -> None:
    """An H200 allocated 874,031,616 bytes more during a sync of 437 MB of weights in one bucket."""
    spike = failure(diagnosis("WeightSyncSpike"), phase="sync")
    plan = FIRST_PLAN.model_copy(update={"sync_bucket_bytes": 512 << 20})
    remedy = change_after(spike, plan, constraints(profile=FACTS))
    assert remedy.plan.sync_bucket_bytes == FACTS.largest_parameter_bytes
    with_one_bucket, largest_alone = 874_031_616, 2 * FACTS.largest_parameter_bytes
    assert remedy.change.remedy.expected_bytes == pytest.approx(with_one_bucket - largest_alone, rel=0.01)
