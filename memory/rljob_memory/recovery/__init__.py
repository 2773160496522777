"""The recovery engine: everything that is decided after a failure, or on a warning before one."""

from rljob_memory.recovery import messages
from rljob_memory.recovery.constraints import Constraints
from rljob_memory.recovery.effects import observed, role_that_shows
from rljob_memory.recovery.failure import Changed, FailureReport, GiveUp, GiveUpReason, Response, Restart
from rljob_memory.recovery.remedies import CHANGEABLE_SETTINGS
from rljob_memory.recovery.respond import more_host_memory, prevent, respond
from rljob_memory.recovery.state import RecoveryState

__all__ = [
    "CHANGEABLE_SETTINGS",
    "Changed",
    "Constraints",
    "FailureReport",
    "GiveUp",
    "GiveUpReason",
    "RecoveryState",
    "Response",
    "Restart",
    "messages",
    "more_host_memory",
    "observed",
    "prevent",
    "respond",
    "role_that_shows",
]
