"""The wait for CustomResourceDefinitions, in all states that an API server reports after their creation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rljob_cluster import api_client
from rljob_cluster.api_client import ApiClient
from rljob_cluster.certificates import Authority
from rljob_cluster.errors import ClusterError

NAMES_ACCEPTED = {"type": "NamesAccepted", "status": "True"}
ESTABLISHED = {"type": "Established", "status": "True"}
NOT_YET: list[dict[str, Any] | None] = [
    None,
    {},
    {"conditions": None, "storedVersions": ["v1"]},
    {"conditions": []},
    {"conditions": [NAMES_ACCEPTED]},
    {"conditions": [NAMES_ACCEPTED, {"type": "Established", "status": "False"}]},
]
"""Of `status`. The API server returns the third one from the creation itself."""


def crds(*statuses: object) -> bytes:
    items = [{"metadata": {"name": f"crd-{number}"}, "status": status} for number, status in enumerate(statuses)]
    return json.dumps({"items": items}).encode()


DONE = {"conditions": [NAMES_ACCEPTED, ESTABLISHED]}


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ApiClient:
    monkeypatch.setattr(api_client, "POLL_SECONDS", 0.0)
    authority = Authority(tmp_path)
    authority.ensure()
    return ApiClient("https://127.0.0.1:1", authority.pair, authority.client("someone", "someone"))


def test_the_wait_ends_when_all_crds_are_established(client: ApiClient, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [None, crds(), *(crds(DONE, status) for status in NOT_YET), crds(DONE, DONE), crds()]
    monkeypatch.setattr(ApiClient, "get", lambda client, path: answers.pop(0))
    client.wait_established()
    assert answers == [crds()], "the last one is not asked for"


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (None, "no answer from the API server"),
        (crds(), "found none"),
        (crds(DONE, *NOT_YET[2:4]), "these without the condition: crd-1, crd-2"),
    ],
)
def test_the_error_names_the_crds_that_are_not_established(
    client: ApiClient, monkeypatch: pytest.MonkeyPatch, answer: bytes | None, found: str
) -> None:
    monkeypatch.setattr(ApiClient, "get", lambda client, path: answer)
    with pytest.raises(ClusterError, match=found):
        client.wait_established(seconds=0.01)
