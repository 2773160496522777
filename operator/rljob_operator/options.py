"""Options of `rljob-operator run`, derived from the settings, for the command line, the manual and the chart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from rljob_operator.settings import Group, OperatorSettings

ENVIRONMENT_PREFIX = "RLJOB_OPERATOR_"
_UNITS = (("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10))


@dataclass(frozen=True, slots=True)
class OperatorOption:
    """One setting as an option and as an environment variable."""

    name: str
    """Name of the field of OperatorSettings."""
    field: FieldInfo

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def group(self) -> Group:
        [group] = [item for item in self.field.metadata if isinstance(item, Group)]
        return group

    @property
    def description(self) -> str:
        """Markdown, in one line."""
        return " ".join((self.field.description or "").split())

    @property
    def required(self) -> bool:
        return self.field.is_required()

    @property
    def default(self) -> str:
        """Default as it is written on the command line; empty for none."""
        return "" if self.required else _written(self.name, self.field.default)

    @property
    def is_switch(self) -> bool:
        """The option takes no value and has a form `--no-…`."""
        return self.field.annotation is bool

    @property
    def is_repeatable(self) -> bool:
        return get_origin(self.field.annotation) in (tuple, dict)

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.field.annotation) if get_origin(self.field.annotation) is Literal else ()

    @property
    def metavar(self) -> str:
        if get_origin(self.field.annotation) is dict:
            return "NAME=VALUE"
        if self.field.annotation == tuple[dict[str, Any], ...]:
            return "JSON"
        units = (("_bytes", "QUANTITY"), ("_seconds", "SECONDS"), ("", "N" if self.field.annotation is int else "TEXT"))
        return next(metavar for ending, metavar in units if self.name.endswith(ending))


def options() -> list[OperatorOption]:
    """All options, in the order of declaration."""
    return [OperatorOption(name, field) for name, field in OperatorSettings.model_fields.items()]


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
