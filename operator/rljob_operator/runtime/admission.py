"""The admission webhook: the prediction of the condition Fits, before the API server stores a job.

It answers nothing but warnings and refusals of jobs that do not fit. Without an answer in time, the API server stores
the job, as it does while the operator is away (`failurePolicy: Ignore`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import kopf
import structlog
from aiohttp import web
from pydantic_core import from_json, to_json

from rljob_api.job import MANAGED_BY_OPERATOR
from rljob_operator.kube.resources import Object
from rljob_operator.observe.job_facts import parse_job
from rljob_operator.reconcile.fits import Objection, objection
from rljob_operator.reconcile.observed import ObservedNode
from rljob_operator.runtime.endpoints import serve, tls_context
from rljob_operator.settings import OperatorSettings

_log = structlog.get_logger(__name__)

WebhookFn = Callable[[Any], Awaitable[Any]]
"""kopf's function from an AdmissionReview to its answer."""

_MAX_REVIEW_BYTES = 4 << 20
"""A review has the object before and after the change. The API server stores objects of at most 1.5 MiB."""
_MAX_REVIEWS = 8
"""Reviews in memory at a time; others wait in their sockets."""
_ANSWER_SECONDS = 1.5

_thread = ThreadPoolExecutor(1, "admission")
"""One thread: everyone who reaches the port can cause a review, and several would slow down the event loop."""


async def serve_admission(settings: OperatorSettings, review: WebhookFn) -> AsyncIterator[kopf.WebhookClientConfig]:
    """Serve the webhook until cancelled, if it has a certificate. The chart configures the API server."""
    async with AsyncExitStack() as stack:
        if settings.admission_certificate:
            tls = await tls_context(stack, settings.admission_certificate)
            await stack.enter_async_context(serve(admission_app(review), settings.admission_port, tls))
        yield kopf.WebhookClientConfig()
        await asyncio.Event().wait()


def admission_app(review: WebhookFn) -> web.Application:
    """The endpoint /validate."""

    reading = asyncio.Semaphore(_MAX_REVIEWS)

    async def validate(request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS), reading:
                given = await _in_thread(_decoded, await request.read())
                return web.json_response(await review(given))
        except TimeoutError:
            return web.Response(status=503, text=f"no answer within {_ANSWER_SECONDS} s\n")
        except web.HTTPException:
            raise
        except Exception as error:
            return web.Response(status=400, text=f"expected an AdmissionReview of an RLJob, found an error: {error}\n")

    app = web.Application(client_max_size=_MAX_REVIEW_BYTES)
    app.router.add_post("/validate", validate)
    return app


def _decoded(body: bytes) -> Object:
    """The review as one of a new object: kopf remembers all others until it sees their deletion, and watches none."""
    review: Object = from_json(body)
    return review | {"request": review["request"] | {"operation": "CREATE"}}


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(_thread, function, *arguments)


async def objection_to(
    new: Mapping[str, Any] | None, old: Mapping[str, Any] | None, nodes: Sequence[ObservedNode]
) -> Objection | None:
    """The objection to a new or changed job; None if there is none, or if it cannot be found out."""
    try:
        found: Objection | None = await _in_thread(_objection, new, old, nodes)
        return found
    except Exception as error:
        _log.exception("job admitted without a prediction; this is a bug in the operator", error=str(error))
        return None


def _objection(
    new: Mapping[str, Any] | None, old: Mapping[str, Any] | None, nodes: Sequence[ObservedNode]
) -> Objection | None:
    after, before = (parse_job(to_json(dict(obj))).job if obj else None for obj in (new, old))
    if after is None or after.spec.managed_by not in (None, MANAGED_BY_OPERATOR):
        return None
    return objection(after.spec, before.spec if before else None, nodes)
