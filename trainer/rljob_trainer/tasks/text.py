"""`text`: prompts from a text file, one in each line."""

from __future__ import annotations

from rljob_api.task_args import TextArgs
from rljob_client.errors import BadInput
from rljob_trainer.tasks.built_in import TaskContext
from rljob_trainer.tasks.jsonl import content_of
from rljob_trainer.tasks.task import Item


def items(args: TextArgs, context: TaskContext) -> list[Item]:
    """The lines, without surrounding white space; empty ones are skipped. A record has the line as `prompt`.

    Raises `BadInput` if the file cannot be read, or is not UTF-8.
    """
    file = context.directory / args.path
    try:
        text = content_of(file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise BadInput(
            f"{file}, line {line}: expected UTF-8 text, found the byte 0x{error.object[error.start]:02x}; save the "
            "file as UTF-8"
        ) from error
    return [Item(line.strip(), {"prompt": line.strip()}) for line in text.split("\n") if line.strip()]
