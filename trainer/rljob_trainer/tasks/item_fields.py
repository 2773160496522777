"""The fields of an item: the prompt as text, and advice for other forms of data."""

from __future__ import annotations

from typing import Any

from rljob_api.bounds import is_storable
from rljob_client.errors import BadInput
from rljob_trainer.tasks.user_code import short_repr

_USUAL_NAMES = ("prompt", "question", "problem", "instruction", "query", "input", "text")
_CONVERSATIONS = ("messages", "conversations", "conversation", "prompt")
_MOST_NAMES = 12
_CONVERT = (
    "conversations are not supported yet: write the text of the user's message into a field of its own, and the text "
    "of a system message into task.systemPrompt"
)


def question_of(record: dict[Any, Any], field: str, where: str, *, advice: str = "") -> str:
    """The prompt in `field`. Raises `BadInput`, with the place `where`, if it is no text that UTF-8 can express.

    `advice`: the way to name another field. Default: the option of the task jsonl.
    """
    question = record.get(field)
    if isinstance(question, str):
        require_storable(question, field, where)
        return question
    found = f"{type(question).__name__} ({short_repr(question)})" if field in record else f"none in {_names(record)}"
    raise BadInput(
        f"{where}: expected the prompt as text in the field {field!r}, found {found}; {_advice(record, field, advice)}"
    )


def require_storable(text: str, field: str, where: str) -> None:
    """Raise `BadInput` if the text in `field` has half of a surrogate pair."""
    if not is_storable(text):
        raise BadInput(
            f"{where}: expected text in the field {field!r}, found half of a character in {short_repr(text)}; "
            "the text was cut within a character, such as an emoji: correct or remove it"
        )


def _advice(record: dict[Any, Any], field: str, advice: str) -> str:
    if any(_is_conversation(record.get(name)) for name in (field, *_CONVERSATIONS)):
        return _CONVERT
    texts = [name for name, value in record.items() if isinstance(name, str) and isinstance(value, str)]
    likely = next((name for name in _USUAL_NAMES if name in texts), None)
    if advice or field in record or not texts:
        return advice or "write it as text"
    return f"write args.promptField: {likely}" if likely else "name the field with the prompt in args.promptField"


def _is_conversation(value: Any) -> bool:
    """True for a list of messages, such as [{"role": "user", "content": "…"}]."""
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def _names(record: dict[Any, Any]) -> str:
    names = [short_repr(name).strip("'") for name in list(record)[:_MOST_NAMES]]
    more = ", …" if len(record) > _MOST_NAMES else ""
    return f"the fields {', '.join(names)}{more}" if names else "an object without fields"
