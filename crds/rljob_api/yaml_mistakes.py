"""Explanations of text that is not YAML: the probable mistake, its line, and its correction."""

from __future__ import annotations

import re
from typing import NamedTuple

import yaml


class _Mistake(NamedTuple):
    reason: str
    """Regular expression, found in the parser's error."""
    lines: str
    """Lines to look at, in this order: `p` where the parser stopped, `b` the one before, `c` where the structure that
    it was reading began."""
    line: str
    """Regular expression, found in that line."""
    message: str
    """Format of the explanation, with the named groups of both expressions."""


_KEY = r"^\s*(?:- +)*(?P<key>[\w.\"'-]+)"
_NO_SPACE = _KEY + r":(?P<value>[^\s:/\"'].*?)\s*$"

_MISTAKES = (
    _Mistake(r"", "pbc", r"\{[{%]", "found a template that is not rendered: helm template CHART | rljob validate -"),
    _Mistake(r"", "pbc", r"^(<{7}|={7}|>{7})( |$)", "found a conflict marker of git: resolve the conflict"),
    _Mistake(r"character '`'", "p", r"^\s*```", "found a Markdown code fence: remove the lines that begin with ```"),
    _Mistake(r"character '\\t'", "p", r"", "found a tab, which is not allowed here: replace it by spaces"),
    _Mistake(
        r"unknown escape character '(?P<char>.+)'",
        "p",
        r"",
        r"\{char} is not an escape sequence in double quotes: use single quotes, in which a backslash is a backslash",
    ),
    _Mistake(
        r"escape sequence of",
        "p",
        r"",
        r"\x, \u and \U in double quotes require hexadecimal digits: use single quotes, in which a backslash is a "
        "backslash",
    ),
    _Mistake(r"quoted scalar.*(end of stream|separator)", "c", r"", "the quotation mark that opens here is not closed"),
    _Mistake(
        r"found '<scalar>'",
        "p",
        r":\s+'[^']*'\w",
        "the text in single quotes ends at its apostrophe: write '' for an apostrophe, or use double quotes",
    ),
    _Mistake(
        r"found '<scalar>'",
        "p",
        r":\s+\"[^\"]*\"",
        'the text ends at its second quotation mark: write \\" for a quotation mark in the text, or use single quotes',
    ),
    _Mistake(
        r"found '<scalar>'",
        "p",
        _KEY + r":\s+(?P<value>[{\[].*?)\s*$",
        "a value that begins with a bracket is an object or a list: quote the text, as in {key}: '{value}'",
    ),
    _Mistake(r"mapping values", "p", r"^---\s*\S", "write --- on a line of its own"),
    _Mistake(
        r"mapping values|expected ':'", "cbp", _NO_SPACE, "a space is missing after the colon: write {key}: {value}"
    ),
    _Mistake(
        r"mapping values",
        "p",
        _KEY + r":\s+(?P<module>[\w.]+):\s+(?P<function>\w+)\s*$",
        "a value with a colon and a space must be quoted; for a Python function, write {key}: {module}:{function}",
    ),
    _Mistake(
        r"mapping values",
        "p",
        _KEY + r":\s+(?P<value>[^'\"\s].*:(\s.*?|))\s*$",
        "a value with a colon and a space must be quoted: write {key}: '{value}'",
    ),
    _Mistake(r"mapping values|expected ':'", "cb", _KEY + r"\s*=", "expected a colon, found =: write {key}: VALUE"),
    _Mistake(r"mapping values|expected ':'", "cb", _KEY + r"\s*$", "{key} has no colon: write {key}: VALUE"),
    _Mistake(r"<document start>", "p", r"", "a second document must begin with a line ---"),
    _Mistake(
        r"mapping values|block mapping start|block collection|found '-'",
        "p",
        r"",
        "the indentation differs from that of the lines around it: align it with the fields of its object",
    ),
    _Mistake(
        r"character '(?P<char>.)'|scanning an (alias|anchor)|undefined alias|tag '(?P<tag>.*)'|block scalar",
        "p",
        r"(^|[:\[,{-]\s*)(?P<first>[%@`*&!|>][^\s,\]}]*)",
        "{first} cannot begin a text, because its first character has a meaning in YAML: quote the text",
    ),
    _Mistake(r"flow mapping", "c", r"", "a {{ that opens here is not closed, or a comma is missing after it"),
    _Mistake(r"flow sequence", "c", r"", "a [ that opens here is not closed, or a comma is missing after it"),
    _Mistake(r"found '(?P<char>[}\]])'", "p", r"", "{char} closes nothing: remove it, or quote the text"),
    _Mistake(r"unhashable key", "p", r"", "the name of a field must be a text, found an object or a list"),
    _Mistake(r"for merging", "p", r"", "<<: requires an alias of an object, such as <<: *defaults"),
)


def explain(text: str, error: yaml.YAMLError) -> tuple[str, int | None]:
    """Explanation of the `error` in `text`, and its line, from 1."""
    if isinstance(error, yaml.reader.ReaderError):
        code = error.character if isinstance(error.character, int) else ord(error.character)
        return f"found the control character U+{code:04X}: remove it", text.count("\n", 0, error.position) + 1
    context, problem = getattr(error, "context", None), getattr(error, "problem", None)
    lines = _lines_of(text, error)
    for mistake in _MISTAKES:
        reason = re.search(mistake.reason, f"{context} {problem}")
        for number in (lines[kind] for kind in mistake.lines if reason and kind in lines):
            if found := re.search(mistake.line, text.splitlines()[number - 1] if number else ""):
                groups = {**(reason.groupdict() if reason else {}), **found.groupdict()}
                return mistake.message.format(**groups), number
    return problem or str(error), lines.get("p")


def _lines_of(text: str, error: yaml.YAMLError) -> dict[str, int]:
    """Numbers of the lines of `text` that the rules look at, by their letters."""
    written = text.splitlines()
    stopped, began = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
    found = {}
    if stopped is not None:
        found["p"] = stopped.line + 1
        earlier = [n for n in range(1, min(found["p"], len(written) + 1)) if written[n - 1].strip()]
        if earlier:
            found["b"] = earlier[-1]
    if began is not None:
        found["c"] = began.line + 1
    return {kind: number for kind, number in found.items() if number <= len(written)} | (
        {"p": len(written)} if found.get("p", 0) > len(written) else {}
    )
