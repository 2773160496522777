"""vLLM's kernel for the log-probabilities of sampled tokens, with the blocks of the fast path."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [151_936, 16_384, 1_000])
def test_log_probabilities_are_those_of_vllm(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, vocabulary: int
) -> None:
    from vllm.v1.worker.gpu.sample import logprob

    from rljob_trainer.rollout.fast_decoding import speed_up_kernels

    torch.manual_seed(0)
    logits = (4 * torch.randn(128, vocabulary, device="cuda")).to(dtype)
    sampled = torch.randint(vocabulary, (128,), device="cuda")
    expected = logprob.compute_topk_scores(logits, 0, sampled)
    for name in ("_topk_log_softmax_kernel", "_ranks_kernel"):
        monkeypatch.setattr(logprob, name, getattr(logprob, name))
    speed_up_kernels()
    found = logprob.compute_topk_scores(logits, 0, sampled)
    assert torch.equal(found.logprob_token_ids, expected.logprob_token_ids)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=4e-6)
    exact = torch.log_softmax(logits.double(), -1).gather(1, sampled[:, None]).float()
    torch.testing.assert_close(found.logprobs, exact, rtol=0, atol=4e-6)
