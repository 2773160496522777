"""Generates the CRDs, the JSON schema for editors and the manifest reference of the docs from the API types.

python -m rljob_api.generate [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from rljob_api.custom_resource import rljob_definition, step_report_definition
from rljob_api.inlined_schema import inlined_schema
from rljob_api.job import RLJob
from rljob_api.reference_page import reference_page

REPOSITORY = Path(__file__).resolve().parents[2]
_HEADER = "# Generated from rljob_api by `make generate`; do not edit.\n"


def generated_files() -> dict[str, str]:
    """Text of every generated file, by its path in the repository."""
    definitions = [rljob_definition(), step_report_definition()]
    return {
        **{f"crds/manifests/{crd['metadata']['name']}.yaml": _yaml(crd) for crd in definitions},
        "crds/schema/rljob.schema.json": _editor_schema(),
        "docs/manifest.md": reference_page(),
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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not up to date")
    check = parser.parse_args().check
    files = {REPOSITORY / name: text for name, text in generated_files().items()}
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
    sys.exit(main())
