"""YAML documents, read as kubectl reads them, with the line of every field."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import yaml

from rljob_api.storable_text import is_storable, storable

Path = tuple[str | int, ...]

_MOST_FIELDS = 100_000

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
    """Fields that occur more than once. Fields within a duplicate are left out."""
    written: dict[Path, str] = field(default_factory=dict)
    """Text of the values without quotes that YAML does not read as text, such as `no`, `010` and `1e6`."""
    written_names: dict[Path, str] = field(default_factory=dict)
    """Text of the names of fields that YAML does not read as text, such as `on`."""

    def line_of(self, path: Path) -> int | None:
        """Line of the field at `path`, or of the nearest existing object around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)


def read_documents(text: str) -> Iterator[Document]:
    """The documents of `text` that are not empty. Raises yaml.MarkedYAMLError at one that is not YAML, is nested too
    deeply, or has aliases that stand for too many fields."""
    loader = _Loader(_with_spaces(text))
    try:
        while loader.check_node() and (node := loader.get_node()) is not None:
            document = Document(None, {})
            for path, line in loader.fields(node, document):
                if len(document.lines) > _MOST_FIELDS:
                    raise _refused(f"found more than {_MOST_FIELDS} fields, aliases included", node)
                if (
                    path
                    and path in document.lines
                    and not any(_within(path, each.path) for each in document.duplicates)
                ):
                    document.duplicates.append(Duplicate(path, document.lines[path]))
                document.lines[path] = line
            data = loader.construct_document(node)
            if data is not None:
                yield replace(document, data=data)
    except RecursionError:
        raise _refused("found too many levels of nesting") from None
    finally:
        loader.dispose()


def _with_spaces(text: str) -> str:
    """`text`, with spaces for tabs if it is JSON: its strings contain none, but YAML allows none around them."""
    if "\t" in text and text.lstrip().startswith(("{", "[")):
        with suppress(ValueError, RecursionError):
            json.loads(text)
            return text.replace("\t", " ")
    return text


def _within(path: Path, outer: Path) -> bool:
    return path[: len(outer)] == outer


def _refused(problem: str, node: yaml.Node | None = None) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark if node else None)


class _Loader(yaml.SafeLoader):
    """Loader with kubectl's rules: 2e-5 is a number (YAML 1.1 requires a point), 0o17 as well, 12:30 is none,
    2026-01-01 and all keys are strings."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        mapping = super().construct_mapping(node, deep)
        return {_name(key): mapping[key] for key in mapping}

    def fields(
        self, node: yaml.Node, document: Document, path: Path = (), seen: frozenset[int] = frozenset()
    ) -> Iterator[tuple[Path, int]]:
        """Path and line of every field under `node`, starting with `node` itself. Texts that YAML reads otherwise are
        noted in `document`."""
        if id(node) in seen:
            raise _refused("found an alias that contains itself", node)
        yield path, node.start_mark.line + 1
        seen |= {id(node)}
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    at = (*path, key.value if key.tag == _TEXT else _name(self.construct_object(key)))
                    if at[-1] != key.value:
                        document.written_names[at] = key.value
                    below = self.fields(value, document, at, seen)
                    next(below)
                    yield at, key.start_mark.line + 1
                    yield from below
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                yield from self.fields(item, document, (*path, index), seen)
        elif isinstance(node, yaml.ScalarNode) and node.style is None and node.tag != _TEXT:
            document.written[path] = node.value

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """Pairs of escapes such as \\ud83d\\ude00 are one character, as in JSON; half of one is no text."""
        value = super().construct_scalar(node)
        if isinstance(value, str) and not is_storable(value):
            try:
                return value.encode("utf-16", "surrogatepass").decode("utf-16")
            except UnicodeDecodeError:
                problem = f"found half of a character in {storable(value[:40])!r}: write the whole character"
                raise _refused(problem, node) from None
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
