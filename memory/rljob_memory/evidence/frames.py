"""Frames of a stack in a log, in the forms of Python, IPython, rich and arrows; calls that Ray or a message names."""

from __future__ import annotations

import re
from collections.abc import Sequence

_FILE = r"[~/\w][^\s:\"]{1,400}"
_FRAME = re.compile(
    # a traceback of Python, also inside JSON
    r'File \\?["\'](?P<file>[^"\']{1,400}?)\\?["\'], line \d+, in (?P<name>[\w<>.]{1,100})'
    # IPython's, of today and of before, and rich's
    r"|^\s{0,8}File (?P<file2>[^\s:\"]{1,400}):\d+, in (?P<name2>[\w<>.]{1,100})\("
    r"|^\s{0,8}(?P<file3>[~/][^\s:\"]{1,400}\.py) in (?P<name3>[\w<>.]{1,100})\("
    # Colab's
    r"|^\s{0,8}\[(?P<file5>[~/][^\]\s]{1,400}\.py)\]\([^)\s]{1,200}\) in (?P<name5>[\w<>.]{1,100})\("
    r"|^\W{0,4} (?P<file4>[~/][^\s:\"]{1,400}\.py):\d+ in (?P<name4>[\w<>.]{0,100})"
)
_ARROW = re.compile(r"->|→|=>")
_BETWEEN_ARROWS = re.compile(rf"^\s*(?P<file>{_FILE}\.py):\d+:? (?:in )?(?P<name>[\w<>.]{{1,100}})(?:\(\))?\s*$")
_CALL = re.compile(
    # Ray's name of the task, above the traceback that it returns
    r"\bray::(?:\w{1,100}\.)?(?P<name>\w{1,100})\(\)"
    # RLinf: `running RolloutWorker's function sync_weights`; vLLM: `Error executing method 'load_model'`
    r"|(?:[Ee]rror|[Ee]xception|[Ff]ail).{0,100}\b(?:running|executing|calling) "
    r"(?:[\w.']{1,80} ){0,2}(?:function|method) [`'\"]?(?P<name2>\w{3,100})"
    # TensorRT-LLM
    r"|[Ee]rror executing (?P<name3>\w{3,100}) with args\b"
)

_CODE = re.compile(
    r"^\W{0,12}(?:return |raise |for |if |with )?[\w.\[\], *'\"]{1,80}(?: ?[-+*/]?= ?\S|\w\()|^\W{0,8}(?:→|->) \w"
)
_NUMBERED = re.compile(r"^[│|]?\s*(?:❱|-+>)?\s*\d{1,6}[\s│]+(?=[\w#])")
"""The number before a line of code, in the boxes of rich and in IPython's tracebacks."""
_LOGGED = re.compile(r"\d\d:\d\d:\d\d|\b(?:INFO|WARNING|ERROR|DEBUG|Error|Warning)\b|^\s*(?:\$|>|export) ")


def frames_of(text: str) -> list[str]:
    """`file in function` of each frame in the line, with the slashes of Unix."""
    found = [[part for part in match.groups() if part is not None] for match in _FRAME.finditer(text)]
    if not found and ".py:" in text and _ARROW.search(text):
        matches = (_BETWEEN_ARROWS.match(part) for part in _ARROW.split(text))
        found = [[match["file"], match["name"]] for match in matches if match]
    return [file.replace("\\", "/") + " in " + name.rpartition(".")[2] for file, name in found]


def code_of(lines: Sequence[str]) -> list[str]:
    """The lines that can be code or the name of a function, as posts have them without a frame."""
    plain = [_NUMBERED.sub("", line).strip() for line in lines]
    return [line for line in plain if _CODE.search(line) and not _LOGGED.search(line)]


def call_of(text: str) -> str | None:
    """The function that the line reports as running, in the form of a frame; None if it names none."""
    if not any(word in text for word in ("ray::", " function ", " method ", " executing ")):
        return None
    match = _CALL.search(text)
    return f"log in {match['name'] or match['name2'] or match['name3']}" if match else None
