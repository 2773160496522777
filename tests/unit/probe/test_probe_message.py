"""`rljob_api` reads the message, and it fits the kubelet's limit."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rljob_api.termination_message import MAX_TERMINATION_MESSAGE_BYTES, read_termination_message
from rljob_probe.explanation import explanation_of
from rljob_probe.failure import memory_failure
from rljob_probe.termination_log import encoded

TEXT = st.text(max_size=3000) | st.text(alphabet='\x00\x1b"\\é€🙂\udcff', min_size=1, max_size=3000)


@given(words=TEXT, exit_code=st.sampled_from([80, 81, 82]))
def test_any_text_of_an_error_fits_and_is_read(words: str, exit_code: int) -> None:
    evidence: dict[str, Any] = {
        "time": "2026-01-01T00:00:00Z", "attempt": 10**6, "role": "rollout", "rank": 10**6, "step": 10**9,
        "phase": "checkpoint", "message": words,
        "memory": {"role": "rollout", "rank": 10**6, "peakRssBytes": 1 << 60, "deviceFreeBytes": 1 << 60},
    }  # fmt: skip
    explanation = explanation_of(exit_code, evidence)
    text = encoded(explanation.exit_code, explanation.message, explanation.evidence)
    assert len(text) <= MAX_TERMINATION_MESSAGE_BYTES
    message = read_termination_message(text.decode())
    assert message is not None
    assert message.exit_code == exit_code
    assert message.evidence is not None


@given(words=TEXT)
def test_any_error_is_classified_without_an_exception(words: str) -> None:
    memory_failure(RuntimeError(words))
