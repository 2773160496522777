from __future__ import annotations

from rljob_api.exit_codes import ExitCode
from rljob_api.job import RLJob
from rljob_client.run_directory.summary import summarize
from rljob_trainer.trackers.values import record_values, run_config, summary_values
from tests.unit.ledger.samples import step_record
from tests.unit.trackers.tracked import evaluation


def test_a_step_has_all_numbers_of_its_record() -> None:
    assert record_values(step_record(3, 0.5, metrics={"loss": 0.25, "rewards/format": 1.0})) == {
        "reward/mean": 0.5,
        "reward/std": 0.1,
        "reward/min": 0.0,
        "reward/max": 1.0,
        "response/mean_tokens": 3.25,
        "response/max_tokens": 8,
        "response/clipped_ratio": 0.25,
        "seconds/rollout": 0.6,
        "seconds/update": 0.3,
        "seconds/step": 1.0,
        "step_tokens": 1000,
        "tokens_per_second": 1000.0,
        "memory/policy": 1.0,
        "memory/rollout": 2.0,
        "loss": 0.25,
        "rewards/format": 1.0,
    }


def test_an_evaluation_has_a_prefix() -> None:
    assert record_values(evaluation(2)) == {
        "evaluation/reward_mean": 0.75,
        "evaluation/avg@8": 0.75,
        "evaluation/seconds": 2.0,
    }


def test_the_configuration_leaves_out_what_may_be_secret() -> None:
    secret = {"env": [{"name": "A", "value": "secret"}]}
    spec = {
        "model": {"uri": "hf://org/name"},
        "task": {"name": "digits"},
        "algorithm": {"steps": 4},
        "topology": "Disaggregated",
        "policy": {"gpusPerReplica": 2, "template": {"spec": {"containers": [{"name": "rljob", **secret}]}}},
        "rollout": {"template": {"spec": {"secret": 1}}, "engineArgs": {"hf_token": "secret"}},
        "controller": {"template": {"metadata": {"annotations": {"secret": "secret"}}}},
        "checkpoint": {"volume": {"nfs": {"server": "secret", "path": "/"}}},
        "tracking": [{"name": "trackio", "args": {"server_url": "https://host/?write_token=secret"}}],
        "envFrom": [{"secretRef": {"name": "secret"}}],
        **secret,
    }
    job = RLJob.model_validate({"metadata": {"name": "sums"}, "spec": spec}, by_alias=True, by_name=False)
    config = run_config(job)
    assert "secret" not in str(config)
    assert config["policy"]["gpusPerReplica"] == 2
    assert config["checkpoint"]["everySteps"] == 10


def test_the_summary_is_flat() -> None:
    summary = summarize([step_record(1)], job="sums", total_steps=4, exit_code=ExitCode.TERMINATED)
    values = summary_values(summary)
    assert values["status"] == "Stopped"
    assert values["peak_memory/rollout/gib"] == 2.0
    assert "first_reward" not in values, "null is left out"
