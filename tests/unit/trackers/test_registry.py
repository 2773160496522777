from __future__ import annotations

import importlib.util

import pytest

from rljob_api.tracking import TRACKERS, TrackerSpec
from rljob_client.errors import BadInput
from rljob_trainer.trackers import registry
from rljob_trainer.trackers.registry import require_trackers, tracker_class, unknown_args
from rljob_trainer.trackers.tracker import Tracker


def test_every_row_of_the_api_has_a_class() -> None:
    assert all(issubclass(tracker_class(name), Tracker) for name in TRACKERS)


def test_a_library_that_is_not_installed_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    trackers = [TrackerSpec(name="tensorboard"), TrackerSpec(name="wandb")]
    require_trackers(trackers)
    without = {"wandb": None}
    monkeypatch.setattr(registry, "find_spec", lambda name: without.get(name, importlib.util.find_spec("json")))
    with pytest.raises(BadInput, match=r"expected the package wandb, found none; install rljob-trainer\[trackers\]"):
        require_trackers(trackers)


@pytest.mark.parametrize(
    ("name", "known", "wrong", "message"),
    [
        (
            "wandb",
            {"entity": "a", "mode": "offline"},
            "entitiy",
            "wandb.init has no such argument; did you mean entity?",
        ),
        ("mlflow", {"tracking_uri": "http://a", "tags": {}}, "trackinguri", "did you mean tracking_uri?"),
        (
            "tensorboard",
            {"logdir": "a", "flush_secs": 1},
            "log_dir",
            "EventFileWriter has no such argument; did you mean",
        ),
        ("trackio", {"space_id": "a"}, "zzz", "trackio.init has no such argument; known: auto_log_cpu, "),
    ],
)
def test_arguments_that_the_library_does_not_have_are_found(
    name: str, known: dict[str, object], wrong: str, message: str
) -> None:
    trackers = [TrackerSpec(name="tensorboard"), TrackerSpec(name=name, args={**known, wrong: 1})]
    [(path, found)] = unknown_args(trackers).items()
    assert path == ("spec", "tracking", 1, "args", wrong)
    assert message in found
