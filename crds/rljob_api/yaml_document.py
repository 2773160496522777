"""YAML documents, read as kubectl reads them, with the line of every field."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from rljob_api.storable_text import is_storable, storable

Path = tuple[str | int, ...]

_MOST_FIELDS = 100_000

_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$")


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML document."""

    data: Any
    """Value of the document."""
    lines: dict[Path, int]
    """Line of each field, from 1."""
    duplicates: list[Path]
    """Fields that occur more than once."""

    def line_of(self, path: Path) -> int | None:
        """Line of the field at `path`, or of the nearest existing object around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)


def read_documents(text: str) -> list[Document]:
    """All documents of `text` that are not empty. Raises yaml.MarkedYAMLError if it is not YAML, if it is nested too
    deeply, or if its aliases stand for too many fields."""
    loader = _Loader(text)
    documents = []
    try:
        while loader.check_node() and (node := loader.get_node()) is not None:
            lines, duplicates = dict[Path, int](), list[Path]()
            for path, line in _fields(node):
                if len(lines) > _MOST_FIELDS:
                    raise _refused(f"found more than {_MOST_FIELDS} fields, aliases included", node)
                if path in lines and path:
                    duplicates.append(path)
                lines[path] = line
            data = loader.construct_document(node)
            if data is not None:
                documents.append(Document(data, lines, duplicates))
    except RecursionError:
        raise _refused("found too many levels of nesting") from None
    finally:
        loader.dispose()
    return documents


def _refused(problem: str, node: yaml.Node | None = None) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark if node else None)


class _Loader(yaml.SafeLoader):
    """Loader with kubectl's rules: 2e-5 is a number (YAML 1.1 requires a point), 2026-01-01 and all keys are
    strings."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        mapping = super().construct_mapping(node, deep)
        return {key if isinstance(key, str) else json.dumps(key, default=str): mapping[key] for key in mapping}

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


_READ_OTHERWISE = ("tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _READ_OTHERWISE]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def _fields(node: yaml.Node, path: Path = (), seen: frozenset[int] = frozenset()) -> Iterator[tuple[Path, int]]:
    """Path and line of every field under `node`, starting with `node` itself."""
    if id(node) in seen:
        raise _refused("found an alias that contains itself", node)
    yield path, node.start_mark.line + 1
    seen |= {id(node)}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                below = _fields(value, (*path, key.value), seen)
                next(below)
                yield (*path, key.value), key.start_mark.line + 1
                yield from below
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _fields(item, (*path, index), seen)
