"""Damaged documents end no parser of what others write, other than as documented.

Objects of the API server: operator/runtime/test_any_object.py. Logs: memory/diagnosis/test_damaged_evidence.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rljob_api.exit_codes import ExitCode
from rljob_api.manifest import ManifestError, load_manifest
from rljob_api.termination_message import TerminationMessage, read_termination_message
from rljob_client.errors import OutputUnavailable
from rljob_client.run_directory.ledger import read_ledger
from rljob_operator.diagnose.explanation import container_ends, explanation_of
from rljob_testing.repository import EXAMPLES
from rljob_trainer.ledger.checkpoint_manifest import MANIFEST_NAME, CheckpointManifest, FileDigest, find_damage
from tests.unit.ledger.samples import step_record
from tests.unit.operator.observe.objects import pod

HOSTILE: Sequence[Any] = (
    *(0, -1, 2**63, 10**400, 0.5, 1e308, float("inf"), float("nan")),
    *("", "\x00", "\u2028", "é" * 5000, "A" * 70_000, "1e999", "null", "!!python/object:os.system", "2026-02-30"),
    *(None, True, [], {}, [[]], [{}] * 300, {"": {}}),
)
"""Values at the limits of a type, and beyond."""
DEEP = ("[" * 20_000, '{"a":' * 1_500 + "1" + "}" * 1_500)
FILES = {"policy/__0_0.distcp": FileDigest(size_bytes=4, sha256="0" * 64)}
CHECKPOINT = CheckpointManifest(step=20, files=FILES).to_json()
LEDGER = b"".join(step_record(step).model_dump_json().encode() + b"\n" for step in (1, 2, 3))
MESSAGE = TerminationMessage(exit_code=ExitCode.COMPLETE, message="60 steps are committed", step=60).to_json()
MANIFESTS = [path.read_bytes() for path in sorted(EXAMPLES.glob("*.yaml"))]

any_times = settings(
    max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@st.composite
def damaged(draw: st.DrawFn, *documents: bytes) -> bytes:
    """One of the documents with parts cut off, left out, repeated, or replaced by a hostile value; or any bytes."""
    text = draw(st.sampled_from(documents) | st.binary(max_size=200))
    for _ in range(draw(st.integers(0, 4))):
        begin, end = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        value = draw(st.sampled_from(HOSTILE))
        put = st.sampled_from([b"", str(value).encode(), json.dumps(value).encode(), text[begin:end] * 3])
        text = text[:begin] + draw(put | st.binary(max_size=4)) + text[draw(st.sampled_from([begin, end, len(text)])) :]
    return text


@any_times
@given(damaged(*MANIFESTS, *(text.encode() for text in DEEP)))
def test_a_manifest_is_read_or_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "job.yaml").write_bytes(data)
    with suppress(ManifestError):
        load_manifest(tmp_path / "job.yaml")


@any_times
@given(damaged(MESSAGE, b"Traceback (most recent call last):\nRuntimeError: CUDA error", *map(str.encode, DEEP)))
def test_a_termination_message_has_an_exit_code_or_is_text(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    message = read_termination_message(text)
    assert message is None or 0 <= message.exit_code <= 255
    terminated = {"exitCode": 80, "reason": "Error", "finishedAt": "2026-01-01T00:00:01Z", "message": text}
    status = {"phase": "Failed", "containerStatuses": [{"name": "rljob", "state": {"terminated": terminated}}]}
    for end in container_ends(pod(status=status)):
        explanation = explanation_of(end)
        assert explanation is None or explanation.message.isprintable()


@any_times
@given(damaged(CHECKPOINT, *(text.encode() for text in DEEP)))
def test_the_damage_of_a_checkpoint_is_named_in_a_few_words(tmp_path: Path, data: bytes) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(data)
    problem = find_damage(tmp_path, step=20)
    assert problem is None or len(problem) < 10_000


@any_times
@given(damaged(LEDGER, *(text.encode() for text in DEEP)))
def test_a_ledger_is_read_or_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(data)
    with suppress(OutputUnavailable):
        assert 0 <= read_ledger(path).whole_bytes <= len(data)


@pytest.mark.parametrize("text", DEEP)
def test_deep_json_is_no_termination_message(text: str) -> None:
    assert read_termination_message(text) is None
