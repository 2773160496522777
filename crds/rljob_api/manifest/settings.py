"""Settings of the command line, such as `--set algorithm.steps=10`, which change the fields of a manifest."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import yaml

from rljob_api.manifest.yaml_document import Document, Path, explain, is_within, read_documents

_PART = re.compile(r"([A-Za-z_][\w-]*)((?:\[\d+\])*)")
_TOP_LEVEL = ("apiVersion", "kind", "metadata", "spec")


class SettingError(ValueError):
    """A setting that cannot be applied. The message has the correction."""

    def __init__(self, setting: str, message: str) -> None:
        super().__init__(message)
        self.setting = setting


def with_settings(document: Document, settings: Sequence[str]) -> Document:
    """`document` with the fields that the settings name, each as `path=value`. The last one of a field counts.

    A path is that of error messages: `spec.` may be left out, an item of a list is `name[0]`. A value is YAML; without
    one, or with null, the field is removed, so that its default applies. Raises `SettingError`.
    """
    for setting in settings:
        name, equals, text = setting.partition("=")
        path = _path(setting, name, bool(equals))
        value, written = _value(setting, text)
        document = replace(
            document,
            data=_with_value(document.data, path, value, setting),
            lines={field: line for field, line in document.lines.items() if not is_within(field, path)},
            duplicates=[each for each in document.duplicates if not is_within(each.path, path)],
            written={field: text for field, text in document.written.items() if not is_within(field, path)}
            | {(*path, *field): text for field, text in written.items()},
            set_by={field: text for field, text in document.set_by.items() if not is_within(field, path)}
            | {path: setting},
        )
    return document


def setting_of(document: Document, field: Path) -> str | None:
    """The setting that has set or created `field`; None if it is in the file."""
    for path, setting in sorted(document.set_by.items(), key=lambda each: -len(each[0])):
        created = is_within(path, field) and field not in document.lines
        if created or is_within(field, path):
            return setting
    return None


def _path(setting: str, name: str, has_value: bool) -> Path:
    parts = [_PART.fullmatch(part) for part in name.split(".")]
    if not has_value or not all(parts):
        raise SettingError(
            setting,
            "expected a path and a value, such as algorithm.steps=10 or rewards[0].weight=2; names with other "
            "characters are written in the object that contains them, such as nodeSelector='{example.com/pool: a}'",
        )
    path: list[str | int] = []
    for part in parts:
        assert part is not None
        path += [part[1], *map(int, re.findall(r"\d+", part[2]))]
    return tuple(path) if path[0] in _TOP_LEVEL else ("spec", *path)


def _value(setting: str, text: str) -> tuple[Any, dict[Path, str]]:
    """The value, and its parts that YAML does not read as text, as they are written."""
    try:
        documents = list(read_documents(text))
    except yaml.YAMLError as error:
        raise SettingError(setting, f"the value is not YAML: {explain(text, error)[0]}") from None
    if len(documents) > 1:
        raise SettingError(setting, "expected one value, found several YAML documents")
    return (documents[0].data, documents[0].written) if documents else (None, {})


def _with_value(data: Any, path: Path, value: Any, setting: str, above: str = "the manifest") -> Any:
    """`data` with `value` at `path`; no object of `data` is changed, because aliases may share it."""
    if not path:
        return value
    first, rest = path[0], path[1:]
    if isinstance(first, int):
        if not isinstance(data, list) or first >= len(data):
            found = f"{len(data)} items, counted from 0" if isinstance(data, list) else "no list"
            raise SettingError(setting, f"expected an item {first} in {above}, found {found}; set the whole list")
        return [*data[:first], _with_value(data[first], rest, value, setting, f"{above}[{first}]"), *data[first + 1 :]]
    if data is None:
        data = {}
    if not isinstance(data, dict):
        found = "a list: write the number of an item, such as [0]" if isinstance(data, list) else f"{data!r:.60}"
        raise SettingError(setting, f"expected an object in {above}, found {found}")
    if not rest and value is None:
        return {name: field for name, field in data.items() if name != first}
    return {**data, first: _with_value(data.get(first), rest, value, setting, str(first))}
