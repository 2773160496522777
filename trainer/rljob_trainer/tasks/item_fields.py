"""The fields of an item: the prompt as text or as a conversation, the answer, and advice for other forms of data."""

from __future__ import annotations

from typing import Any, TypeGuard

from rljob_api.bounds import is_storable
from rljob_client.errors import BadInput
from rljob_trainer.tasks.user_code import short_repr

Conversation = list[dict[str, Any]]
"""Messages with `role` and `content`, as text, and what else the chat template reads in a message."""

_PROMPT, _MESSAGES = "prompt", "messages"
_USUAL_NAMES = (_MESSAGES, _PROMPT, "question", "problem", "instruction", "query", "input", "text", "conversations")
_MOST_NAMES = 12

_CONTINUED = ("user", "assistant", "tool")
"""Roles of a last message, after which the model writes."""

_ROLES = ("system", "developer", *_CONTINUED)


def question_of(record: dict[Any, Any], field: str, where: str, *, advice: str = "") -> str | Conversation:
    """The prompt in `field`; without a field `prompt`, the conversation in `messages`.

    Raises `BadInput`, with the place `where`, if it is neither text nor a list of messages, or if UTF-8 cannot express
    it. `advice`: the way to name another field. Default: the option of tasks that read files.
    """
    if field == _PROMPT and field not in record and _is_conversation(record.get(_MESSAGES)):
        field = _MESSAGES
    question = record.get(field)
    if isinstance(question, str):
        require_storable(question, field, where)
        return question
    if _is_conversation(question):
        return _conversation(question, field, where)
    found = f"{type(question).__name__} ({short_repr(question)})" if field in record else f"none in {_names(record)}"
    raise BadInput(
        f"{where}: expected the prompt as text or as a list of messages in the field {field!r}, found {found}; "
        f"{_advice(record, field, advice)}"
    )


def answer_of(record: dict[Any, Any], field: str) -> Any:
    """The answer in `field`, which may be a path into objects, as in `reward_model.ground_truth`; None without one."""
    if field in record:
        return record[field]
    value: Any = record
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def require_storable(text: str, field: str, where: str) -> None:
    """Raise `BadInput` if the text in `field` has half of a surrogate pair."""
    if not is_storable(text):
        raise BadInput(
            f"{where}: expected text in the field {field!r}, found half of a character in {short_repr(text)}; "
            "the text was cut within a character, such as an emoji: correct or remove it"
        )


def _conversation(messages: Conversation, field: str, where: str) -> Conversation:
    """The messages, without absent values, which a column of a data set has as null."""
    for number, message in enumerate(messages):
        place = f"{field}[{number}]"
        role, content = message.get("role"), message.get("content")
        if "role" not in message and "from" in message:
            raise BadInput(
                f"{where}: expected a message with role and content in {place}, found one with "
                f"{', '.join(map(str, message))}; write role in place of from (user for human, assistant for gpt), and "
                "content in place of value"
            )
        if role not in _ROLES:
            raise BadInput(
                f"{where}: expected a role in {place} ({', '.join(_ROLES)}), found {short_repr(role)}; correct the role"
            )
        if not isinstance(content, str):
            raise BadInput(
                f"{where}: expected text as content in {place}, found {type(content).__name__} "
                f"({short_repr(content)}); write the text of the message; images, audio and calls of tools are not "
                "supported"
            )
        require_storable(content, f"{place}.content", where)
    if (last := messages[-1]["role"]) not in _CONTINUED:
        raise BadInput(
            f"{where}: expected a conversation in {field} that ends with a message of the {', '.join(_CONTINUED[:-1])} "
            f"or {_CONTINUED[-1]}, found one of the {last}; end it with the user's message"
        )
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def _advice(record: dict[Any, Any], field: str, advice: str) -> str:
    if advice or field in record:
        return advice or 'write text, or messages such as [{"role": "user", "content": "…"}]'
    names = [name for name, value in record.items() if isinstance(value, str) or _is_conversation(value)]
    likely = next((name for name in _USUAL_NAMES if name in names), None)
    if likely:
        return f"write args.promptField: {likely}"
    return "name the field with the prompt in args.promptField" if names else "write the prompt into that field"


def _is_conversation(value: Any) -> TypeGuard[Conversation]:
    """True for a list of messages, such as [{"role": "user", "content": "…"}]."""
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def _names(record: dict[Any, Any]) -> str:
    names = [short_repr(name).strip("'") for name in list(record)[:_MOST_NAMES]]
    more = ", …" if len(record) > _MOST_NAMES else ""
    return f"the fields {', '.join(names)}{more}" if names else "an object without fields"
