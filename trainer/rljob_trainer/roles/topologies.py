"""The roles of a topology."""

from __future__ import annotations

from rljob_api.topology import Topology
from rljob_trainer.phase_clock import PartClock
from rljob_trainer.roles.colocated import ColocatedRoles
from rljob_trainer.roles.disaggregated import DisaggregatedRoles
from rljob_trainer.roles.roles import Roles
from rljob_trainer.roles.settings import RoleSettings

_ROLES: dict[Topology, type[Roles]] = {"Colocated": ColocatedRoles, "Disaggregated": DisaggregatedRoles}


def roles_of(settings: RoleSettings, clock: PartClock) -> Roles:
    """The roles of a job, without processes. `clock`: measures the parts of a start-up."""
    return _ROLES[settings.topology](settings, clock)
