"""Suggested corrections of invalid values."""

from __future__ import annotations

import difflib
import json
import os
import re
from pathlib import Path
from typing import Any

from rljob_api.manifest.option_names import OPTION_VALUES, normalized
from rljob_api.schemas import Schema
from rljob_api.task_args import TASKS

_AMOUNT = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt])i?b?\s*$", re.IGNORECASE)
_GROUPED = re.compile(r"^[-+]?\d{1,3}([ ,_']\d{3})+$")
_THOUSANDS = re.compile(r"^(\d+)\s*([km])$", re.IGNORECASE)
_NO_SPACE = re.compile(r"^([A-Za-z_][\w.-]*):([^\s:/].*)$")
_TEMPLATE = re.compile(r"\{\{.*\}\}|\$\{\w+\}|\$\(\w+\)")
_ON, _OFF = ("enabled", "on", "yes", "true", "1"), ("disabled", "off", "no", "false", "0", "none", "never", "")
_DURATION = re.compile(r"^(\d+)\s*(s|sec|m|min|h|d)$", re.IGNORECASE)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DEFAULT_FIELDS = {
    "metadata": "name",
    "spec.model": "uri",
    "spec.model.cache": "persistentVolumeClaim",
    "spec.task": "name",
    "spec.task.answer": "pattern",
    "spec.task.files": "configMap",
    "spec.task.rewards": "function",
    "spec.algorithm": "name",
    "spec.algorithm.learningRateSchedule": "name",
    "spec.checkpoint.volume": "persistentVolumeClaim",
    "spec.trainer": "image",
}
"""Field that is suggested if a string is found where an object is expected."""
_FUNCTION_PATTERN, _URI_PATTERN, _NAME_PATTERN = "[A-Za-z0-9_.]*:[A-Za-z_]", "(oci|hf|", "[-a-z0-9"
_SCHEMES = "oci|hf|pvc|file|random"
_HUB_PAGE = re.compile(
    r"^(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+?)(?:/(?:tree|resolve|blob)/([\w.-]+).*)?/?$"
)
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w.-]+)?$")
_IMAGE = re.compile(r"^([\w-]+\.)+[\w-]+(:\d+)?/[\w./-]+(:[\w.-]+|@sha256:\w+)?$")


def hint(field: str, schema: Schema, found: Any, written: str | None, directory: Path | None) -> str:
    """Suggested correction of the value `found` of `field` (dotted), which has this `schema`; empty if there is none.

    `written` is the text in the manifest if YAML does not read it as text. `directory` is that of the manifest; None if
    the manifest is not a file on this machine.
    """
    if isinstance(found, str) and (template := _TEMPLATE.search(found)):
        render = "helm template CHART" if "{{" in template[0] else "envsubst < FILE"
        return f"; {template[0]} is a template that is not rendered: {render} | rljob validate -"
    if isinstance(found, str) and (typographic := re.search("[\u00a0\u2018\u2019\u201c\u201d]", found)):
        return f"; replace the typographic character U+{ord(typographic[0]):04X} with that of the keyboard"
    values = OPTION_VALUES.get(field, {})
    if not isinstance(found, dict | list) and (known := values.get(normalized(str(found)))):
        return f"; {known if ' ' in known else f'write {known}'}"
    allowed = [str(value) for value in schema.get("enum", [schema["const"]] if "const" in schema else [])]
    if allowed:
        return _allowed_value(allowed, found)
    if schema.get("x-kubernetes-int-or-string"):
        return _auto_or_amount(schema, found)
    match schema.get("type"):
        case "integer" if "Seconds" in field and (duration := _DURATION.match(str(found))):
            return f"; write {int(duration[1]) * _SECONDS[duration[2][0].lower()]}, in seconds"
        case "integer" | "number" | "boolean" as kind:
            return _literal(kind, found, written)
        case "string" if isinstance(found, list) and field == "spec.task.reward":
            return f"; write rewards: [{', '.join(f'{{function: {function}}}' for function in found)}]"
        case "string":
            return _string(schema, found, written, directory)
        case "object" if isinstance(found, str) and field != "spec.task.rewards" and (parts := _NO_SPACE.match(found)):
            return f"; write a space after the colon: {parts[1]}: {parts[2]}"
        case "object" if isinstance(found, str):
            return _object(field, found)
        case "array" if isinstance(found, str):
            items = found.split() if field.startswith("spec.trainer.") else [found]
            return f"; write {json.dumps(items, ensure_ascii=False)}"
        case "array" if isinstance(found, dict) and field == "spec.env" and found:
            name, value = next(iter(found.items()))
            return f"; write [{{name: {name}, value: {json.dumps(value, default=str)}}}]"
        case "array" if isinstance(found, dict):
            return "; write a dash before its first field"
    return ""


def _object(field: str, found: str) -> str:
    """Suggestion for an object that is written as a string."""
    name, equals, value = found.partition("=")
    if field == "spec.env" and equals:
        return f"; write {{name: {name}, value: {json.dumps(value)}}}"
    if (main := _DEFAULT_FIELDS.get(field)) is None:
        return ""
    text = f"{{claimName: {found}}}" if field == "spec.checkpoint.volume" else json.dumps(found, ensure_ascii=False)
    return f"; write {field.rpartition('.')[2]}: {{{main}: {text}}}"


def _allowed_value(allowed: list[str], found: Any) -> str:
    """The `allowed` value that was probably meant. YAML reads on, yes, off and no as true and false."""
    if isinstance(found, bool) and "Enabled" in allowed:
        return f"; write {'Enabled' if found else 'Disabled'}"
    if isinstance(found, bool) and not found and "Disabled" in allowed:
        return "; write Disabled (YAML reads off and no as false)"
    if not isinstance(found, str):
        return ""
    same = {normalized(value): value for value in allowed}.get(normalized(found))
    close = same or next(iter(difflib.get_close_matches(found.lower(), list(map(str.lower, allowed)), n=1)), None)
    if close is None and "Disabled" in allowed and normalized(found) in _OFF:
        close = "Disabled"
    if close is None and "Enabled" in allowed and normalized(found) in _ON:
        close = "Enabled"
    return f"; did you mean {next(v for v in allowed if v.lower() == close.lower())}?" if close else ""


def _auto_or_amount(schema: Schema, found: Any) -> str:
    takes_auto = any("Auto" in str(option.get("pattern")) for option in schema.get("anyOf", []))
    is_count = any(option.get("pattern") == "^Auto$" for option in schema.get("anyOf", []))
    if takes_auto and normalized(str(found)) in ("auto", "none", "default", "true"):
        return "; write Auto"
    if isinstance(found, float) and found.is_integer() and found > 0:
        return f"; write {int(found)}"
    if (isinstance(found, float) and 0 < found < 1) or re.fullmatch(r"\d+\s*%", str(found)):
        return "; a share of the memory is not supported"
    if isinstance(found, str) and (decimal := re.fullmatch(r"(\d+),(\d+)\s*([kMGTP]i?)", found.strip())):
        return f"; write {decimal[1]}.{decimal[2]}{decimal[3]}"
    if isinstance(found, str) and is_count:
        return _literal("integer", found, None)
    if isinstance(found, str) and (amount := _AMOUNT.match(found)):
        number, unit = amount[1], amount[2].upper()
        return f"; write {number}{unit}i or {number}{unit.replace('K', 'k')}"
    return ""


def _literal(kind: str, found: Any, written: str | None) -> str:
    """Suggestion for a number or a boolean."""
    if isinstance(found, float) and kind == "integer" and found.is_integer():
        return f"; write {int(found)}" if abs(found) < 1e18 else ""
    if not isinstance(found, str):
        return f"; YAML reads {written} as {json.dumps(found)}" if written and isinstance(found, bool) else ""
    text = found.strip()
    if kind == "boolean":
        return {"true": "; remove the quotes", "false": "; remove the quotes"}.get(
            text.lower(),
            f"; write {str(normalized(text) in _ON).lower()}" if normalized(text) in (*_ON, *_OFF) else "",
        )
    if text and text != text.rstrip(",;") and _is_literal(text.rstrip(",;")):
        return f"; write {text.rstrip(',;')}"
    if _is_literal(text):
        whole = float(text).is_integer() and abs(float(text)) < 1e18
        is_plain = kind == "number" or re.fullmatch(r"[-+]?\d+", text)
        return "; remove the quotes" if is_plain else f"; write {int(float(text))}" if whole else ""
    if _GROUPED.match(text):
        return f"; write {re.sub('[ ,_]', '', text)}"
    if thousands := _THOUSANDS.match(text):
        return f"; write {int(thousands[1]) * (1000 if thousands[2].lower() == 'k' else 1_000_000)}"
    return ""


def _string(schema: Schema, found: Any, written: str | None, directory: Path | None) -> str:
    pattern = schema.get("pattern", "")
    if isinstance(found, dict):
        if _FUNCTION_PATTERN in pattern and len(found) == 1 and isinstance(function := next(iter(found.values())), str):
            return f"; write {next(iter(found))}:{function}"
        if isinstance(only := found.get("name"), str) and len(found) == 1:
            return f"; write {only}"
        if list(found.values()) == [None]:
            return f'; quote it, because YAML reads {{…}} as an object: "{{{next(iter(found))}}}"'
        return "; an object begins with a name and a colon, or with {: quote a string that contains them"
    if isinstance(found, list):
        return "; only one is supported: write it without a list"
    if "%" in pattern and isinstance(found, int | float):
        percentage = f"{100 * found if 0 < found < 1 else found:g}%"
        return f"; write {percentage}" if re.search(pattern, percentage) else ""
    if not isinstance(found, str):
        return f'; write "{written}", with quotes' if written is not None else f'; write "{found}", with quotes'
    if "|reasoning-gym|" in pattern and ":" not in found:
        close = difflib.get_close_matches(found.lower(), TASKS, n=1)
        data_set = f"reasoning-gym and args: {{dataset: {found}}} for one of its data sets"
        return f"; did you mean {close[0]}?" if close else f"; write {data_set}, or {found}:FUNCTION"
    if _FUNCTION_PATTERN in pattern:
        return _function(found)
    if _URI_PATTERN in pattern:
        return _model_uri(found, directory)
    if _NAME_PATTERN in pattern and (name := re.sub(r"[^a-z0-9]+", "-", found.lower()).strip("-")) != found:
        return f"; write {name}" if re.search(pattern, name) else ""
    return ""


def _function(found: str) -> str:
    """Suggestion for a Python function as module:function."""
    text = found.strip().removesuffix("()").replace(": ", ":").replace("::", ":")
    path, _, function = text.replace("\\", "/").partition(":")
    if not function and not path.endswith(".py") and "." in path and "/" not in path:
        path, _, function = path.rpartition(".")
    folder, _, file = path.rpartition("/")
    relative = "" if path.startswith(("/", "~", "..")) else folder.removeprefix(".").strip("/").replace("/", ".")
    module = f"{relative}.{file.removesuffix('.py')}".strip(".")
    if not re.fullmatch(r"[A-Za-z_][\w.]*", module):
        return "; the name of a module has letters, digits and _ only: rename the file" if function else ""
    if function and not re.fullmatch(r"[A-Za-z_]\w*", function):
        return "; write a function of the module, not of a class" if "." in function else ""
    location = f", with {file} in the manifest's directory" if folder and not relative else ""
    return f"; write {module}:{function or 'FUNCTION'}{location}"


def _model_uri(found: str, directory: Path | None) -> str:
    """Suggestion for the URI of a model."""
    text = found.strip()
    if re.fullmatch(f"({_SCHEMES})://\\S+", text):
        return f"; write {text}, without white space around it"
    if not text or re.fullmatch(f"({_SCHEMES}):/*", text):
        return ""
    if page := _HUB_PAGE.match(text):
        return f"; did you mean hf://{page[1]}{f'@{page[2]}' if page[2] and page[2] != 'main' else ''}?"
    if scheme := re.match(f"({_SCHEMES})(?::/*|//+)", text, re.IGNORECASE):
        rest = text[scheme.end() :]
        return f"; did you mean {scheme[1].lower()}://{'/' if scheme[1].lower() == 'file' else ''}{rest}?"
    if "://" in text:
        return "; download the model to a directory, and write file:///path, or pvc://claim/path on a cluster"
    if drive := re.match(r"([A-Za-z]):[\\/]", text):
        rest = text[drive.end() :].replace("\\", "/")
        return f"; a Windows path is not supported: write file:///mnt/{drive[1].lower()}/{rest} in WSL"
    local = os.path.normpath((directory or Path()).absolute() / os.path.expanduser(text.replace("\\", "/")))
    if directory is not None and os.path.isdir(local):
        return f"; did you mean file://{local}?"
    if text.startswith(("/", "./", "../", "~", ".\\", "..\\")):
        return f"; write file:// and the absolute path of an existing directory ({local} does not exist)"
    if _HUB_NAME.match(text):
        return f"; did you mean hf://{text}?"
    if _IMAGE.match(text):
        return f"; did you mean oci://{text}?"
    return f"; write hf://ORGANIZATION/{text} for a model of the hub" if re.fullmatch(r"[\w.-]+", text) else ""


def _is_literal(text: str) -> bool:
    try:
        return isinstance(json.loads(text), int | float)
    except ValueError:
        return False
