"""Rewards from a server. The server is real: this machine's."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rljob_api.task import TaskSpec
from rljob_client.errors import BadInput
from rljob_trainer.rewards import servers
from rljob_trainer.rollout_batch import Completion, Prompt
from rljob_trainer.tasks.prompt_format import PromptFormat
from rljob_trainer.tasks.reward_pool import RewardPool
from rljob_trainer.tasks.reward_source import RewardSource
from rljob_trainer.tasks.rewards import Response
from rljob_trainer.tasks.scoring import RewardFailure, compute_rewards
from rljob_trainer.tasks.step_rewards import try_out
from rljob_trainer.tasks.task import Item, Task

Reply = tuple[int, Any]


class Server:
    """Replies as `answer` decides, and keeps the requests."""

    def __init__(self, answer: Callable[[str, dict[str, Any], dict[str, str]], Reply]) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.most_at_once = 0
        self._now, self._lock = 0, threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    outer.requests.append((self.path, body))
                    outer._now += 1
                    outer.most_at_once = max(outer.most_at_once, outer._now)
                status, value = answer(self.path, body, dict(self.headers))
                with outer._lock:
                    outer._now -= 1
                content = value.encode() if isinstance(value, str) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    monkeypatch.setattr(servers, "_FIRST_DELAY_SECONDS", 0.0)
    started: list[Server] = []

    def start(answer: Callable[[str, dict[str, Any], dict[str, str]], Reply]) -> Server:
        started.append(Server(answer))
        return started[-1]

    yield start
    for server in started:
        server.close()


def says(text: str) -> Callable[..., Reply]:
    return lambda *_: (200, {"choices": [{"message": {"content": text}}]})


def source_of(name: str, directory: Path, **args: Any) -> RewardSource:
    prompt = {"prompt": "Question: {prompt}\nReference: {answer}\nResponse: {response}"} if name == "judge" else {}
    rewards = [{"name": name, "args": {"model": "m", **prompt, **args}}]
    return RewardSource(TaskSpec.model_validate({"name": "digits", "rewards": rewards}), directory, 0)


def result(name: str, directory: Path, prompt: Any = "1+1?", **args: Any) -> float | RewardFailure:
    [reward] = source_of(name, directory, **args).load()
    response = Response.of(
        Prompt(0, [1], "", {"prompt": prompt, "answer": 2}), Completion([1], [0.0], True, "{answer}")
    )
    [[found]] = compute_rewards(reward, [[response]])
    return found


def test_a_judge_is_asked_once_and_its_last_score_counts(serve: Any, tmp_path: Path) -> None:
    server = serve(says("First 2, no: 7.5"))
    assert result("judge", tmp_path, url=f"{server.url}/v1/") == 7.5
    [(path, body)] = server.requests
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "Question: 1+1?\nReference: 2\nResponse: {answer}"}]
    assert (body["model"], body["temperature"]) == ("m", 0)


@pytest.mark.parametrize(
    ("text", "arguments", "value"),
    [
        ("none", {}, None),
        ("Score: 3 of 5", {"scorePattern": r"Score: (\d)"}, 3),
        ("", {}, None),
    ],
)
def test_a_reply_without_a_score_leaves_the_response_out(
    serve: Any, text: str, arguments: dict[str, Any], value: float | None, tmp_path: Path
) -> None:
    found = result("judge", tmp_path, url=serve(says(text)).url, **arguments)
    assert isinstance(found, float)
    assert (found == value) if value is not None else found != found


@pytest.mark.parametrize(
    ("endpoint", "path", "reply", "sent"),
    [
        ("Classify", "/classify", {"data": [{"probs": [-1.5]}]}, "messages"),
        ("Pooling", "/pooling", {"data": [{"data": [[0.5], [-1.5]]}]}, "messages"),
        ("Score", "/score", {"data": [{"score": -1.5}]}, "text_2"),
    ],
)
def test_a_reward_model_scores_prompt_and_response(
    serve: Any, endpoint: str, path: str, reply: Any, sent: str, tmp_path: Path
) -> None:
    server = serve(lambda *_: (200, reply))
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    assert result("reward_model", tmp_path, conversation, url=server.url, endpoint=endpoint) == -1.5
    [(asked, body)] = server.requests
    assert asked == path
    assert body["use_activation"] is False
    if sent == "messages":
        assert body["messages"] == [*conversation, {"role": "assistant", "content": "{answer}"}]
    else:
        assert body["text_2"] == "{answer}"
        assert "Be brief." in body["text_1"]


def test_the_token_comes_from_the_variable_alone(serve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def answer(_path: str, _body: Any, headers: dict[str, str]) -> Reply:
        if headers.get("Authorization") != "Bearer right":
            return 401, "invalid token"
        return says("1")()

    url = serve(answer).url
    monkeypatch.setenv("JUDGE_TOKEN", "right")
    assert result("judge", tmp_path, url=url, tokenVariable="JUDGE_TOKEN") == 1.0
    monkeypatch.setenv("JUDGE_TOKEN", "wrong")
    failure = result("judge", tmp_path, url=url, tokenVariable="JUDGE_TOKEN")
    assert isinstance(failure, RewardFailure)
    assert failure.message.startswith("got 401 Unauthorized: invalid token from http://")
    assert failure.message.endswith("correct the token in JUDGE_TOKEN")
    assert "wrong" not in failure.message
    assert "write args.tokenVariable" in str(result("judge", tmp_path, url=url))
    monkeypatch.delenv("JUDGE_TOKEN")
    assert "in the variable JUDGE_TOKEN, found none" in str(
        result("judge", tmp_path, url=url, tokenVariable="JUDGE_TOKEN")
    )


@pytest.mark.parametrize(
    ("status", "requests", "message"),
    [
        (503, 3, "got no reply from .* in 3 requests, at last 503 "),
        (429, 3, "in 3 requests, at last 429 "),
        (400, 1, "got 400 Bad Request: no .*; correct the arguments"),
        (404, 1, r"got 404 Not Found: no .*; correct args\.url and args\.model"),
    ],
)
def test_only_requests_that_may_succeed_are_repeated(
    serve: Any, status: int, requests: int, message: str, tmp_path: Path
) -> None:
    server = serve(lambda *_: (status, "no"))
    found = result("judge", tmp_path, url=server.url, retries=2)
    assert isinstance(found, RewardFailure)
    assert not found.traceback
    assert re.search(message, found.message), found.message
    assert len(server.requests) == requests


def test_a_server_that_recovers_is_no_failure(serve: Any, tmp_path: Path) -> None:
    replies = iter([(500, "busy"), (502, "busy"), says("4")()])
    assert result("judge", tmp_path, url=serve(lambda *_: next(replies)).url) == 4.0


@pytest.mark.parametrize("reply", ["<html>", {"error": "no"}, {"choices": []}, []])
def test_replies_of_another_program_are_named(serve: Any, reply: Any, tmp_path: Path) -> None:
    found = result("judge", tmp_path, url=serve(lambda *_: (200, reply)).url)
    assert isinstance(found, RewardFailure)
    assert "correct args.url" in found.message, found.message


def task_of(source: RewardSource, tokenizer: Any) -> Task:
    items = [Item("q", {"prompt": "q", "answer": "7"})]
    return Task("jsonl", items, source.load(), PromptFormat(tokenizer), 8, seed=0)


def test_a_server_that_is_down_is_found_before_the_start(tmp_path: Path, tokenizer: Any, serve: Any) -> None:
    server = serve(says("1"))
    server.close()
    source = source_of("judge", tmp_path, url=server.url, retries=0)
    task = task_of(source, tokenizer)
    with (
        RewardPool(source, task.rewards, workers=1, timeout_seconds=60) as pool,
        pytest.raises(
            BadInput, match=r"the reward function judge got no reply from http.*ConnectError.*start the server"
        ),
    ):
        try_out(task, pool, source.spec)


def test_a_judge_that_never_replies_ends_at_the_limit_alone(serve: Any, tmp_path: Path) -> None:
    forever = threading.Event()

    def answer(_path: str, body: Any, _headers: Any) -> Reply:
        if "hang" in body["messages"][0]["content"]:
            forever.wait()
        return says("1")()

    source = source_of("judge", tmp_path, url=serve(answer).url, timeoutSeconds=600)
    try:
        with RewardPool(source, source.load(), workers=1, timeout_seconds=20) as pool:
            scoring = pool.begin([Prompt(0, [1], "q", {})], 3)
            scoring.add(0, [Completion([1], [0.0], True, text) for text in ("a", "hang", "b")])
            [results] = scoring.results(stop_at_failure=False)
            assert len(pool._workers) == 1
    finally:
        forever.set()
    assert results == [1.0, RewardFailure("took more than 20 s (task.rewardTimeoutSeconds)"), 1.0]


def test_waiting_requests_run_concurrently_up_to_the_limit(serve: Any, tmp_path: Path) -> None:
    """The server replies to the waves once it has as many requests as it may get at a time."""
    all_added, at_once = threading.Event(), threading.Barrier(4)

    def answer(_path: str, body: Any, _headers: Any) -> Reply:
        if "wave" in body["messages"][0]["content"]:
            at_once.wait(timeout=120)
        else:
            all_added.wait(timeout=120)
        return says("1")()

    server = serve(answer)
    source = source_of("judge", tmp_path, url=server.url, concurrency=4)
    with RewardPool(source, source.load(), workers=3, timeout_seconds=120) as pool:
        scoring = pool.begin([Prompt(n, [1], "q", {}) for n in range(3)], 4)
        for group, text in enumerate(("first", "wave", "wave")):
            scoring.add(4 * group, [Completion([1], [0.0], True, text)] * 4)
        all_added.set()
        assert scoring.results(stop_at_failure=False) == [[1.0] * 12]
    assert server.most_at_once == 4
