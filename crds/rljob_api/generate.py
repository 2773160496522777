"""Generates the CRDs, the JSON schema for editors, the manifest reference and tables of the docs from the API types.

python -m rljob_api.generate [--check]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from pydantic.alias_generators import to_camel

from rljob_api.algorithms import ALGORITHMS, AlgorithmSettings
from rljob_api.built_in_rewards import BUILT_IN_REWARDS
from rljob_api.custom_resource import memory_profile_definition, rljob_definition, step_report_definition
from rljob_api.job import RLJob, RLJobSpec
from rljob_api.schemas import Schema, inlined_schema
from rljob_api.task_args import TASKS
from rljob_api.tracking import TRACKERS

REPOSITORY = Path(__file__).resolve().parents[2]
_HEADER = "# Generated from rljob_api by `make generate`; do not edit.\n"


def generated_files() -> dict[str, str]:
    """Text of every generated file, by its path in the repository."""
    definitions = [rljob_definition(), step_report_definition(), memory_profile_definition()]
    return {
        **{f"crds/manifests/{crd['metadata']['name']}.yaml": _yaml(crd) for crd in definitions},
        "crds/schema/rljob.schema.json": _editor_schema(),
        "docs/manifest.md": _reference_page(),
        "docs/algorithms.md": _page("algorithms", settings=_settings_of_algorithms(), algorithms=_algorithms()),
        "docs/data.md": _page("data", tasks=_tasks()),
        "docs/observe.md": _page("observe", trackers=_trackers()),
        "docs/rewards.md": _page("rewards", rewards=_rewards()),
    }


def _yaml(document: dict[str, Any]) -> str:
    return _HEADER + yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Dumper without anchors: equal parts are written out each time, so that the files are easy to read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _editor_schema() -> str:
    schema = _without_extensions(inlined_schema(RLJob))
    schema["required"] = ["apiVersion", "kind", *schema["required"]]
    del schema["properties"]["status"]
    whole = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "RLJob", **schema}
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def _without_extensions(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_extensions(item) for item in schema]
    if isinstance(schema, dict):
        return {k: _without_extensions(v) for k, v in schema.items() if not k.startswith("x-kubernetes-")}
    return schema


# The manifest reference of the docs.

_INTRODUCTION = """# Manifest reference

This page is generated from the API types by `make generate`; do not edit it.

`rljob validate FILE` [checks a manifest](run.md#check-a-manifest). Editors with a YAML language server check it as you
type, with [`rljob.schema.json`](../crds/schema/rljob.schema.json): write
`# yaml-language-server: $schema=<path>/rljob.schema.json` on the first line.

Only `model`, `task` and `algorithm.steps` are required. All other fields have defaults.
"""

_REWARDS = """## Built-in reward functions

Entries of `spec.task.rewards`, as in `{name: exact_match, weight: 1.0, args: {ignoreCase: true}}`
([rewards](rewards.md)).
"""


def _reference_page() -> str:
    """Markdown page with a table for `spec`, one for each object in it, and those of the arguments of the tasks and of
    the built-in rewards."""
    args = (
        table
        for name, task in TASKS.items()
        if task.args.model_fields
        for table in _tables(f"spec.task.args of {name}", inlined_schema(task.args))
    )
    rewards = (
        table
        for name, row in BUILT_IN_REWARDS.items()
        for table in _tables(f"args of {name}", inlined_schema(row.args))
    )
    return "\n".join([_INTRODUCTION, *_tables("spec", inlined_schema(RLJobSpec)), *args, _REWARDS, *rewards])


def _tables(path: str, schema: Schema) -> Iterator[str]:
    required = set(schema.get("required", []))
    yield f"## {path}\n\n{schema.get('description', '')}\n"
    if not schema["properties"]:
        return
    yield "| field | type | default | description |\n|---|---|---|---|"
    objects = []
    for name, field in schema["properties"].items():
        default = "*required*" if name in required else _default(field)
        yield f"| `{name}` | {_type(field)} | {default} | {_cell(field.get('description', ''))} |"
        if field.get("properties"):
            objects.append((f"{path}.{name}", field))
        elif field.get("items", {}).get("properties"):
            objects.append((f"{path}.{name}[]", field["items"]))
    yield ""
    for inner_path, inner in objects:
        yield from _tables(inner_path, inner)


def _default(field: Schema) -> str:
    default = field.get("default")
    return "" if default is None or default == {} else f"`{json.dumps(default)}`".replace('"', "")


def _type(field: Schema) -> str:
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return _cell(", ".join(f"`{value}`" for value in field["enum"]))
    if "anyOf" in field:
        return _any_of(field["anyOf"])
    return f"{field.get('type', 'any')}{_bounds(field)}"


def _any_of(alternatives: list[dict[str, Any]]) -> str:
    patterns = [alternative.get("pattern", "") for alternative in alternatives]
    types = ["`Auto`"] if any("Auto" in pattern for pattern in patterns) else []
    types.append("quantity" if any("Ki" in pattern for pattern in patterns) else "integer")
    return " or ".join(types)


def _bounds(field: Schema) -> str:
    low, high = field.get("minimum"), field.get("maximum")
    above, below = field.get("exclusiveMinimum"), field.get("exclusiveMaximum")
    parts = [
        f"≥ {low}" if low is not None else f"> {above}" if above is not None else "",
        f"≤ {high}" if high is not None and high < 10_000_000 else f"< {below}" if below is not None else "",
    ]
    shown = ", ".join(part for part in parts if part)
    return f" {shown}" if shown else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# Tables in other pages of the docs, between comments.


def _page(name: str, **tables: Iterable[Iterable[str]]) -> str:
    """The page with these tables, rows of cells, in place of those between the comments `generated: NAME` and `end`."""
    text = (REPOSITORY / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for table, (header, *rows) in tables.items():
        lines = [_row(header), "|" + "---|" * len(list(header)), *map(_row, rows)]
        place = re.compile(rf"(<!-- generated: {table} -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)
        text, count = place.subn(lambda found, lines=lines: found[1] + "\n".join(lines) + found[2], text)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"expected one comment `generated: {table}` in docs/{name}.md, found {count}")
    return text


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _settings_of_algorithms() -> Iterator[list[str]]:
    names = [each.name for each in fields(AlgorithmSettings)]
    yield ["name", *map(to_camel, names)]
    for name, row in ALGORITHMS.items():
        values = [(getattr(row.defaults, setting), setting in row.unread) for setting in names]
        texts = [f"{value:g}" if isinstance(value, float) else value for value, _ in values]
        yield [f"`{name}`", *("" if unread else f"`{text}`" for text, (_, unread) in zip(texts, values, strict=True))]


def _algorithms() -> Iterator[list[str]]:
    yield ["name", "description", "use it"]
    for name, row in ALGORITHMS.items():
        summary = re.sub(r"arXiv ([\d.]+\d)", r"[arXiv \1](https://arxiv.org/abs/\1)", row.summary)
        yield [f"`{name}`", summary, row.use]


def _tasks() -> Iterator[list[str]]:
    yield ["`task.name`", "prompts", "own reward"]
    yield from ([f"`{name}`", row.prompts, "yes" if row.has_reward else "no"] for name, row in TASKS.items())


def _trackers() -> Iterator[list[str]]:
    yield ["`name`", "`project`, `runName`", "`args`", "data without a server"]
    yield from ([f"`{name}`", row.project or "none", row.arguments, row.data] for name, row in TRACKERS.items())


def _rewards() -> Iterator[list[str]]:
    yield ["name", "reward"]
    yield from ([f"`{name}`", " ".join((row.args.__doc__ or "").split())] for name, row in BUILT_IN_REWARDS.items())


def write(generate: Callable[[], dict[str, str]], description: str | None) -> int:
    """Write the files that differ from what `generate` returns, the text of each by its path in the repository. With
    --check, name them instead, and return 1 if there are any."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not up to date")
    check = parser.parse_args().check
    files = {REPOSITORY / name: text for name, text in generate().items()}
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if check:
            print(f"{path.relative_to(REPOSITORY)} is not up to date: run `make generate`", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
            print(path.relative_to(REPOSITORY))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(write(generated_files, __doc__))
