"""Decoding: documents of any depth are decoded, up to a level."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_operator.kube import decoding
from rljob_operator.kube.decoding import MAX_LEVELS, NESTED_TOO_DEEPLY, decode, prune
from rljob_testing.patience import PATIENCE_SECONDS

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def decoded(data: bytes) -> Any:
    return asyncio.run(decode(data))


def nested(levels: int, opening: str = '{"a":', closing: str = "}") -> str:
    return opening * levels + "1" + closing * levels


@given(JSON)
def test_ordinary_documents_are_left_alone_and_decoded_as_json_does(document: Any) -> None:
    data = json.dumps(document).encode()
    assert prune(data) == data
    if b"\\ud" not in data:
        assert decoded(json.dumps(document, ensure_ascii=False, allow_nan=False).encode()) == document


@pytest.mark.parametrize("levels", [MAX_LEVELS + 20, 1_200, 10_000])
@pytest.mark.parametrize(("opening", "closing"), [('{"a":', "}"), ("[", "]"), ('[{"}":', "}]"), ('{"\\"]":', "}")])
def test_what_is_nested_too_deeply_becomes_a_placeholder(levels: int, opening: str, closing: str) -> None:
    data = json.dumps({"before": "[{", "deep": "DEEP", "after": [1, 2]}).replace(
        '"DEEP"', nested(levels, opening, closing)
    )
    document = decoded(data.encode())
    assert (document["before"], document["after"]) == ("[{", [1, 2])
    assert NESTED_TOO_DEEPLY in json.dumps(document["deep"])


@pytest.mark.parametrize(
    "data", [b"", b"<html>", b"{", b'{"a":', nested(300).encode()[:-5], b"]" * 500, b'"' + b"[" * 300]
)
def test_what_is_not_json_raises_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="line 1 column"):
        decoded(data)


def test_a_large_document_is_decoded_while_the_event_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def decode_when_released(data: bytes) -> Any:
        assert released.wait(PATIENCE_SECONDS)
        return json.loads(data)

    async def story() -> Any:
        decoding_document = asyncio.create_task(decode(json.dumps(["x" * 100_000]).encode()))
        await asyncio.sleep(0)
        released.set()
        return await decoding_document

    monkeypatch.setattr(decoding, "_decoded", decode_when_released)
    assert asyncio.run(story()) == ["x" * 100_000]
