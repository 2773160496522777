"""The command line: `rljob-operator run`. Its options are the fields of OperatorSettings."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Literal

import structlog
from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict
from structlog.dev import plain_traceback

from rljob_operator.options import ENVIRONMENT_PREFIX, OperatorOption, options
from rljob_operator.settings import Group, OperatorSettings

_DESCRIPTION = f"""Reconcile the RLJobs of a cluster until SIGTERM.

Every option is also an environment variable: --lease-name is {ENVIRONMENT_PREFIX}LEASE_NAME. Options take precedence.
The cluster is that of KUBECONFIG if it is set, else that of the pod's service account, else that of ~/.kube/config.
"""
_EXIT_CODES = """exit codes:
  0  stopped by a signal
  1  error; the log names it
  2  invalid option
  3  leadership lost: another replica leads
"""


class _GivenSettings(OperatorSettings, BaseSettings):
    """Settings from options (arguments of the constructor), then from environment variables, then defaults."""

    model_config = SettingsConfigDict(env_prefix=ENVIRONMENT_PREFIX, env_ignore_empty=True, enable_decoding=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. SystemExit for `--help` (0) and invalid options (2)."""
    parser = argparse.ArgumentParser(prog="rljob-operator", description="The Kubernetes operator of RLJob.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        usage="rljob-operator run [OPTIONS]",
        help="reconcile the RLJobs of a cluster until SIGTERM",
        description=_DESCRIPTION,
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    groups = {group: run.add_argument_group(group.value) for group in Group}
    for option in options():
        _add(groups[option.group], option)
    given = vars(parser.parse_args(arguments))
    try:
        settings = _GivenSettings(**given)
    except ValidationError as error:
        run.error(_explanation(error))
    return _run(settings)


def _add(group: argparse._ArgumentGroup, option: OperatorOption) -> None:
    default = " Required." if option.required else f" Default: {option.default}." if option.default else ""
    repeatable = " Repeatable." if option.is_repeatable else ""
    description = option.description.replace("`", "").replace("%", "%%") + repeatable + default
    if option.is_switch:
        group.add_argument(option.flag, help=description, action=argparse.BooleanOptionalAction)
    elif option.is_repeatable:
        group.add_argument(option.flag, help=description, metavar=option.metavar, action="append")
    else:
        group.add_argument(option.flag, help=description, metavar="|".join(option.choices) or option.metavar)


def _explanation(error: ValidationError) -> str:
    """One line for each invalid setting."""
    by_name = {option.name: option for option in options()}
    lines = []
    for problem in error.errors():
        option = by_name[str(problem["loc"][0])]
        if problem["type"] == "missing":
            lines.append(f"{option.flag} is required: set it, or {option.variable}")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            found = "" if "found" in message else f", found {problem['input']!r}"
            lines.append(f"{option.flag}: {message[0].lower()}{message[1:]}{found}")
    return "\n  ".join(lines)


def _run(settings: OperatorSettings) -> int:
    """The exit code of a replica with these settings, once it has stopped."""
    from rljob_operator.handlers import run_operator

    set_up_logs(settings.log_format, settings.log_level)
    log = structlog.get_logger("rljob_operator")
    log.info("starting", trainer_image=settings.trainer_image, namespaces=settings.namespaces or "all")
    try:
        run_operator(settings)
    except Exception as error:
        log.exception("the operator cannot continue", error=str(error))
        return 1
    return 0


# --- Logs ---


def set_up_logs(log_format: Literal["json", "text"], level: str) -> None:
    """Log to stderr: the operator from `level` on, libraries from WARNING on."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    renderers: list[structlog.typing.Processor] = [
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain_traceback)
    ]
    if log_format == "json":
        renderers = [
            structlog.processors.format_exc_info,
            structlog.processors.EventRenamer("message"),
            structlog.processors.JSONRenderer(default=str),
        ]
    processors = [structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=processors))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("rljob_operator").setLevel(level.upper())


if __name__ == "__main__":
    sys.exit(main())
