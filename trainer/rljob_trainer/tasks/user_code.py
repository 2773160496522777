"""The user's Python code, which may raise and return anything."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from rljob_api.bounds import storable
from rljob_client.errors import BadInput

_LAST_FRAMES = 5
_LONGEST_ERROR = 1000
_LONGEST_VALUE = 200


@contextmanager
def user_code(subject: str) -> Iterator[None]:
    """Convert everything that the block raises to `BadInput`. `subject`: the code, such as "the task function x:y"."""
    try:
        yield
    except BaseException as error:
        if is_stop(error) or isinstance(error, BadInput):
            raise
        raise BadInput(f"{subject} {error_text(error)}{_place(error)}") from error


def is_stop(error: BaseException) -> bool:
    """True for the interrupt by which a signal stops this process. User code may raise a plain KeyboardInterrupt."""
    return isinstance(error, KeyboardInterrupt) and type(error) is not KeyboardInterrupt


def error_text(error: BaseException) -> str:
    """`raised KeyError: 'answer'`, for messages."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({short_repr(error.code)})"
    try:
        text = str(error)
    except BaseException:
        text = "(an error without text)"
    text = text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}…"
    return storable(f"raised {type(error).__name__}: {text}".removesuffix(": "))


def short_repr(value: object) -> str:
    """The `repr` of a value, shortened. Its class may refuse one."""
    try:
        text = repr(value)
    except BaseException:
        text = f"an object of the type {type(value).__name__}"
    return storable(text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…")


def last_frames(error: BaseException) -> str:
    """The traceback of the user's code: its last frames, without those of this package that called it."""
    last = traceback.format_list(_frames(error)[-_LAST_FRAMES:])
    return storable("".join(["Traceback (most recent call last):\n", *last, error_text(error).removeprefix("raised ")]))


def call(function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    """The result of the function, which may be an `async def`. All its calls share the event loop of this process."""
    result = function(*arguments, **options)
    return _runner().run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


@cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames = list(traceback.extract_tb(error.__traceback__))
    return [frame for frame in frames if Path(frame.filename).parent != Path(__file__).parent] or frames


def _place(error: BaseException) -> str:
    """` (tasks.py, line 7)`: the line of the user's code that failed."""
    own = Path(__file__).parent  # the last frame if the arguments do not fit
    frames = [each for each in _frames(error) if not each.filename.startswith("<frozen")]
    frames = [each for each in frames if Path(each.filename).parent != own]
    return storable(f" ({frames[-1].filename}, line {frames[-1].lineno})") if frames else ""
