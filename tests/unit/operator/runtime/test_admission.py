"""The admission webhook: no request stops the operator, and the API server gets an answer or stops waiting."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient

from rljob_operator.runtime import admission
from rljob_operator.runtime.admission import admission_app, objection_to
from rljob_testing.operator import manifests
from tests.unit.operator.reconcile.test_fits import ENFORCE, H100, LONG, MODEL
from tests.unit.operator.runtime.test_endpoints import visit

Client = TestClient[web.Request, web.Application]


async def echo(review: Any) -> Any:
    return review


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"request": []}', '{"request": null}', "[" * 100_000, "\ud800"])
def test_anything_but_a_review_is_a_bad_request(body: str) -> None:
    async def story(client: Client) -> None:
        answer = await client.post("/validate", data=body.encode("utf-8", "surrogatepass"))
        assert answer.status == 400
        assert "expected an AdmissionReview" in await answer.text()

    visit(admission_app(echo), story)


def test_kopf_takes_each_review_for_one_of_a_new_object() -> None:
    async def story(client: Client) -> None:
        answer = await client.post("/validate", json={"request": {"uid": "1", "operation": "UPDATE"}})
        assert await answer.json() == {"request": {"uid": "1", "operation": "CREATE"}}

    visit(admission_app(echo), story)


def test_a_late_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_: Any) -> Any:
        await asyncio.Event().wait()

    async def story(client: Client) -> None:
        assert (await client.post("/validate", json={"request": {}})).status == 503

    monkeypatch.setattr(admission, "_ANSWER_SECONDS", 0.01)
    visit(admission_app(never), story)


def test_a_review_larger_than_any_object_is_not_read() -> None:
    async def story(client: Client) -> None:
        assert (await client.post("/validate", data=b" " * (9 << 20))).status == 413

    visit(admission_app(echo), story)


@pytest.mark.parametrize(
    "job",
    [
        None,
        {},
        {"spec": 7},
        {"spec": {"model": {"uri": "random://qwen3?hidden=99999999999999999999"}}},
        manifests.job(policy={"template": {"spec": {"nodeSelector": "x" * 100_000}}}),
        manifests.job(model={"uri": "hf://" + "7B/" * 300}),
        manifests.job(model=MODEL, algorithm=LONG, memory=ENFORCE, managedBy="kueue.x-k8s.io/multikueue"),
    ],
)
def test_an_object_of_any_form_is_admitted(job: Any) -> None:
    assert asyncio.run(objection_to(job, None, [H100])) is None
    assert asyncio.run(objection_to(job, job, [H100])) is None


def test_a_job_that_does_not_fit_is_objected_to() -> None:
    job = manifests.job(model=MODEL, algorithm=LONG, memory=ENFORCE)
    found = asyncio.run(objection_to(job, None, [H100]))
    assert found is not None
    assert found.refused
    assert "does not fit" in found.message
