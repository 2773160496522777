"""Disaggregated roles: policy ranks and engines have GPUs of their own, and exchange only rollouts and weights."""

from __future__ import annotations

from rljob_trainer.roles.roles import Roles


class DisaggregatedRoles(Roles):
    """Any number of policy ranks and of engines. No engine has to make room for a policy, so none ever sleeps."""

    policy_class = "rljob_trainer.roles.policy_actor:DisaggregatedPolicyActor"
    engine_class = "rljob_trainer.roles.rollout_actor:DisaggregatedRolloutActor"

    def load(self) -> None:
        self._begin_loading_policy()
        self._load_engines()
        self._finish_loading_policy()
