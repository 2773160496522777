"""Rewards from a server: a judge that writes a score, and a reward model."""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import suppress
from functools import cache
from typing import Any

import httpx2

from rljob_api.built_in_rewards import JudgeArgs, RewardModelArgs, ServerArgs
from rljob_client.errors import BadInput

_FIRST_DELAY_SECONDS = 0.5
_RETRIED = (408, 425, 429)
_SHOWN_CHARACTERS = 200
_ENDPOINTS = {"Classify": ("classify", "probs"), "Pooling": ("pooling", "data"), "Score": ("score", "score")}
"""Path of each endpoint of vLLM, and the field with the numbers in its reply."""


async def judge(
    prompt: str | list[dict[str, Any]], completion: str, record: dict[str, Any], args: JudgeArgs
) -> float | None:
    """The last score in the judge's reply; None if it has none."""
    values = {"prompt": _text(prompt), "response": completion, "answer": str(record.get("answer", ""))}
    message = re.sub(r"\{(prompt|response|answer)\}", lambda found: values[found[1]], args.prompt)
    body = {"messages": [{"role": "user", "content": message}], "temperature": 0, "max_tokens": args.max_tokens}
    reply = await _reply(args, "chat/completions", body)
    scores = re.findall(args.score_pattern, _part(reply, "choices", 0, "message", "content") or "", re.DOTALL)
    try:
        return float(scores[-1]) if scores else None
    except ValueError:
        raise BadInput(
            f"got the score {scores[-1]!r}, expected a number; correct args.scorePattern, or ask for a number"
        ) from None


async def reward_model(prompt: str | list[dict[str, Any]], completion: str, args: RewardModelArgs) -> float:
    """The last number of the reply about the response."""
    path, field = _ENDPOINTS[args.endpoint]
    if args.endpoint == "Score":
        body: dict[str, Any] = {"text_1": _text(prompt), "text_2": completion}
    else:
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        body = {"messages": [*asked, {"role": "assistant", "content": completion}]}
    value = _part(await _reply(args, path, body | {"use_activation": False}), "data", 0, field)
    while isinstance(value, list) and value:
        value = value[-1]
    if not isinstance(value, int | float):
        raise BadInput(f"got no number from {args.url}; correct args.endpoint, or serve a reward model")
    return float(value)


def _text(prompt: str | list[dict[str, Any]]) -> str:
    """The prompt as text: of a conversation, all messages."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt)


def _part(reply: Any, *path: str | int) -> Any:
    try:
        for key in path:
            reply = reply[key]
    except (LookupError, TypeError):
        raise BadInput(
            f"got a reply without {'.'.join(map(str, path))}: {str(reply)[:_SHOWN_CHARACTERS]}; correct args.url"
        ) from None
    return reply


async def _reply(args: ServerArgs, path: str, body: dict[str, Any]) -> Any:
    """The JSON of the reply. Raises `BadInput` after the last repetition, and for a request that is refused."""
    url = f"{args.url.rstrip('/')}/{path}"
    cause = ""
    for attempt in range(args.retries + 1):
        if attempt:
            await asyncio.sleep(_FIRST_DELAY_SECONDS * 2 ** (attempt - 1))
        try:
            reply = await _client().post(
                url, json={"model": args.model, **body}, headers=_headers(args), timeout=args.timeout_seconds
            )
        except httpx2.HTTPError as error:
            cause = f"{type(error).__name__} {error}".strip()
            continue
        if reply.status_code == 200:
            with suppress(ValueError):
                return reply.json()
        cause = f"{reply.status_code} {reply.reason_phrase}: {reply.text[:_SHOWN_CHARACTERS]}"
        if reply.status_code < 500 and reply.status_code not in _RETRIED:
            raise BadInput(f"got {cause} from {url}; {_advice(reply.status_code, args)}")
    raise BadInput(
        f"got no reply from {url} in {args.retries + 1} requests, at last {cause}; start the server, correct args.url, "
        "or let the job's pods reach it (NetworkPolicy)"
    )


def _headers(args: ServerArgs) -> dict[str, str]:
    name = args.token_variable
    if name is None:
        return {}
    if not os.environ.get(name):
        raise BadInput(
            f"expected a token in the variable {name}, found none; set it, in pods in spec.env from a Secret"
        )
    return {"Authorization": f"Bearer {os.environ[name].strip()}"}


def _advice(status: int, args: ServerArgs) -> str:
    if status in (401, 403):
        return f"correct the token in {args.token_variable}" if args.token_variable else "write args.tokenVariable"
    return "correct args.url and args.model" if status in (200, 404) else "correct the arguments"


@cache
def _client() -> httpx2.AsyncClient:
    return httpx2.AsyncClient(limits=httpx2.Limits(max_connections=None))
