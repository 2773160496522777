"""Options of `rljob-operator run`, derived from the settings: for the command line and for the manual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from rljob_operator.settings import Group, OperatorSettings

ENVIRONMENT_PREFIX = "RLJOB_OPERATOR_"
_UNITS = (("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10))


@dataclass(frozen=True, slots=True)
class Option:
    """One setting as an option and as an environment variable."""

    name: str
    """Name of the field of OperatorSettings."""

    group: Group

    description: str
    """Markdown, in one line."""

    required: bool

    default: str
    """Default as it is written on the command line; empty for none."""

    is_switch: bool
    """The option takes no value and has a form `--no-…`."""

    is_repeatable: bool

    choices: tuple[str, ...]

    metavar: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()


def options() -> list[Option]:
    """All options, in the order of declaration."""
    return [_option(name, field) for name, field in OperatorSettings.model_fields.items()]


def options_table() -> str:
    """Markdown table of all options, by group."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for group in Group:
        lines.append(f"| **{group}** | | |")
        for option in options():
            if option.group is group:
                default = "required" if option.required else f"`{option.default}`" if option.default else ""
                lines.append(f"| `{option.flag}` | {default} | {option.description}{_hint(option)} |")
    return "\n".join(lines) + "\n"


def _hint(option: Option) -> str:
    values = f" One of {', '.join(f'`{choice}`' for choice in option.choices)}." if option.choices else ""
    repeatable = f" Takes `{option.metavar}`." if option.metavar == "NAME=VALUE" else ""
    return values + repeatable + (" Repeatable." if option.is_repeatable else "")


def _option(name: str, field: FieldInfo) -> Option:
    [group] = [item for item in field.metadata if isinstance(item, Group)]
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    is_repeatable = get_origin(field.annotation) in (tuple, dict)
    return Option(
        name=name,
        group=group,
        description=" ".join((field.description or "").split()),
        required=field.is_required(),
        default="" if field.is_required() else _written(name, field.default),
        is_switch=field.annotation is bool,
        is_repeatable=is_repeatable,
        choices=choices,
        metavar=_metavar(name, field.annotation),
    )


def _written(name: str, default: Any) -> str:
    """A default as it is written on the command line."""
    match default:
        case bool():
            return "on" if default else "off"
        case int() if name.endswith("_bytes"):
            return next(f"{default // size}{unit}" for unit, size in _UNITS if default % size == 0)
        case int() | float():
            return f"{default:g}"
        case tuple():
            return " ".join(map(str, default))
        case _:
            return str(default or "")


def _metavar(name: str, annotation: Any) -> str:
    if get_origin(annotation) is dict:
        return "NAME=VALUE"
    if annotation == tuple[dict[str, Any], ...]:
        return "JSON"
    if name.endswith("_bytes"):
        return "QUANTITY"
    if name.endswith("_seconds"):
        return "SECONDS"
    return "N" if annotation is int else "TEXT"
