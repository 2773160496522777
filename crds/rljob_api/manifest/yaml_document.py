"""YAML documents as kubectl reads them, with the line of every field, and explanations of text that is not YAML."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import yaml

from rljob_api.bounds import is_storable, storable

Path = tuple[str | int, ...]

_MAX_FIELDS = 100_000

_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$")
_INTEGER = re.compile(r"^[-+]?(0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$")
_TEXT = "tag:yaml.org,2002:str"


class Duplicate(NamedTuple):
    """A field that occurs more than once in its object."""

    path: Path
    first_line: int
    """Line of its first occurrence, from 1."""


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML document."""

    data: Any
    """Value of the document."""
    lines: dict[Path, int]
    """Line of each field, from 1."""
    duplicates: list[Duplicate] = field(default_factory=list)
    """Fields that occur more than once, without the fields within a duplicate."""
    written: dict[Path, str] = field(default_factory=dict)
    """Unquoted values that YAML does not read as text, such as `no`, `010` and `1e6`, as they are written."""
    written_names: dict[Path, str] = field(default_factory=dict)
    """Names of fields that YAML does not read as text, such as `on`, as they are written."""

    set_by: dict[Path, str] = field(default_factory=dict)
    """Fields that options of the command line have set, with the text of the option."""

    def line_of(self, path: Path) -> int | None:
        """Line of the field at `path`, or of the innermost existing object that would contain it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)


def read_documents(text: str) -> Iterator[Document]:
    """The documents of `text` that are not empty. Raises yaml.MarkedYAMLError at a document that is not YAML, is nested
    too deeply, or has aliases that expand to too many fields."""
    loader = _Loader(_with_spaces(text))
    try:
        while loader.check_node() and (node := loader.get_node()) is not None:
            document = Document(None, {})
            for path, line in loader.fields(node, document):
                if len(document.lines) > _MAX_FIELDS:
                    raise _yaml_error(f"found more than {_MAX_FIELDS} fields, aliases included", node)
                if (
                    path
                    and path in document.lines
                    and not any(is_within(path, duplicate.path) for duplicate in document.duplicates)
                ):
                    document.duplicates.append(Duplicate(path, document.lines[path]))
                document.lines[path] = line
            data = loader.construct_document(node)
            if data is not None:
                yield replace(document, data=data)
    except RecursionError:
        raise _yaml_error("found too many levels of nesting") from None
    finally:
        loader.dispose()


def _with_spaces(text: str) -> str:
    """`text`, with spaces in the place of tabs if it is JSON, which allows tabs between values; YAML does not."""
    if "\t" in text and text.lstrip().startswith(("{", "[")):
        with suppress(ValueError, RecursionError):
            json.loads(text)
            return text.replace("\t", " ")
    return text


def is_within(path: Path, outer: Path) -> bool:
    """True if the field at `path` is that at `outer`, or a part of it."""
    return path[: len(outer)] == outer


def _yaml_error(problem: str, node: yaml.Node | None = None) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark if node else None)


class _Loader(yaml.SafeLoader):
    """Loader with kubectl's rules: 2e-5 (YAML 1.1 requires a point) and 0o17 are numbers; 12:30, 2026-01-01 and all
    keys are strings."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        mapping = super().construct_mapping(node, deep)
        return {_name(key): mapping[key] for key in mapping}

    def fields(
        self, node: yaml.Node, document: Document, path: Path = (), seen: frozenset[int] = frozenset()
    ) -> Iterator[tuple[Path, int]]:
        """Path and line of every field under `node`, starting with `node` itself. Values and names that YAML does not
        read as text are added to `document`."""
        if id(node) in seen:
            raise _yaml_error("found an alias that contains itself", node)
        yield path, node.start_mark.line + 1
        seen |= {id(node)}
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    field_path = (*path, key.value if key.tag == _TEXT else _name(self.construct_object(key)))
                    if field_path[-1] != key.value:
                        document.written_names[field_path] = key.value
                    fields = self.fields(value, document, field_path, seen)
                    next(fields)
                    yield field_path, key.start_mark.line + 1
                    yield from fields
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                yield from self.fields(item, document, (*path, index), seen)
        elif isinstance(node, yaml.ScalarNode) and node.style is None and node.tag != _TEXT:
            document.written[path] = node.value

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """Pairs of escapes such as \\ud83d\\ude00 are one character, as in JSON; half of a pair is an error."""
        value = super().construct_scalar(node)
        if isinstance(value, str) and not is_storable(value):
            try:
                return value.encode("utf-16", "surrogatepass").decode("utf-16")
            except UnicodeDecodeError:
                problem = f"found half of a character in {storable(value[:40])!r}: write the whole character"
                raise _yaml_error(problem, node) from None
        return value


def _name(key: Hashable) -> str:
    return key if isinstance(key, str) else json.dumps(key, default=str)


_RESOLVERS = {f"tag:yaml.org,2002:{name}": pattern for name, pattern in (("float", _FLOAT), ("int", _INTEGER))}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (*_RESOLVERS, "tag:yaml.org,2002:timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in reversed(_RESOLVERS.items()):
    _Loader.add_implicit_resolver(_tag, _pattern, list("-+.0123456789"))


class _ManifestDumper(yaml.SafeDumper):
    """Writes YAML that `_Loader` reads as the same values."""


_ManifestDumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def yaml_text(data: Any) -> str:
    """YAML that `read_documents` reads as `data`."""
    return str(yaml.dump(data, Dumper=_ManifestDumper, sort_keys=False, allow_unicode=True, width=120))


# Explanations of text that is not YAML: the probable mistake, its line, and its correction.


class _Mistake(NamedTuple):
    reason: str
    """Regular expression, found in the parser's error."""
    lines: str
    """Lines to search, in this order: `p` is the line where the parser stopped, `b` the line before it, `c` the line
    where the structure begins that it was reading."""
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
        "{first} cannot begin a string, because it has a meaning in YAML: quote the string",
    ),
    _Mistake(r"flow mapping", "c", r"", "a {{ that opens here is not closed, or a comma is missing after it"),
    _Mistake(r"flow sequence", "c", r"", "a [ that opens here is not closed, or a comma is missing after it"),
    _Mistake(r"found '(?P<char>[}\]])'", "p", r"", "{char} closes nothing: remove it, or quote the text"),
    _Mistake(r"unhashable key", "p", r"", "the name of a field must be a string, found an object or a list"),
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
    """Numbers of the lines of `text` that the mistakes are searched in, by letter."""
    all_lines = text.splitlines()
    stopped, began = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
    found = {}
    if stopped is not None:
        found["p"] = stopped.line + 1
        earlier = [n for n in range(1, min(found["p"], len(all_lines) + 1)) if all_lines[n - 1].strip()]
        if earlier:
            found["b"] = earlier[-1]
    if began is not None:
        found["c"] = began.line + 1
    return {kind: number for kind, number in found.items() if number <= len(all_lines)} | (
        {"p": len(all_lines)} if found.get("p", 0) > len(all_lines) else {}
    )
