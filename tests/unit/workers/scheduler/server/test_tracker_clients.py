"""What a run is called in a tracker, and what it is told of the job."""

import json
from pathlib import Path

import pytest

from streamrl.errors import UserError
from streamrl.spec import RLJob, parse_job
from streamrl.spec.trackers import Trackers
from streamrl_workers.scheduler.server.tracker_clients import TrackerClients, tracked_run
from streamrl_workers.trackers import registry
from streamrl_workers.trackers.registry import check_trackers
from support.jobs import simulated_job


def job() -> RLJob:
    document = simulated_job()
    document["spec"]["trackers"] = {"wandb": {}, "tensorBoard": {}}
    document["spec"]["trainer"]["pod"] = {"env": [{"name": "PASSWORD", "value": "hunter2"}]}
    document["spec"]["generators"][0]["pod"] = {"env": [{"name": "PASSWORD", "value": "hunter2"}]}
    return parse_job(document)


def test_a_run_keeps_its_id_and_another_has_another(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"created_s": 1.0}')
    first = tracked_run(job(), run_dir=tmp_path, store_dir=tmp_path)
    assert first == tracked_run(job(), run_dir=tmp_path, store_dir=tmp_path)
    (tmp_path / "run.json").write_text('{"created_s": 2.0}')
    made_again = tracked_run(job(), run_dir=tmp_path, store_dir=tmp_path)
    on_kubernetes = [tracked_run(job(), run_dir=tmp_path, store_dir=Path(f"/store/job-{uid}")) for uid in "ab"]
    assert len({one["id"] for one in (first, made_again, *on_kubernetes)}) == 4
    assert on_kubernetes[0]["name"] == "simulated"


def test_the_environment_of_pods_is_not_told(tmp_path: Path) -> None:
    told = json.dumps(tracked_run(job(), run_dir=tmp_path, store_dir=tmp_path))
    assert "hunter2" not in told
    assert '"batchGroups"' in told


async def test_without_trackers_nothing_is_started(tmp_path: Path) -> None:
    clients = TrackerClients(parse_job(simulated_job()), run_dir=tmp_path, store_dir=tmp_path)
    clients.start()
    assert (clients.status(), clients.warnings()) == ({}, [])
    await clients.end(None)


def test_a_tracker_without_its_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.TRACKERS, "wandb", ("no_such_package", "wandb"))
    with pytest.raises(UserError) as caught:
        check_trackers(Trackers.model_validate({"wandb": {}, "tensorBoard": {}}))
    line = "spec.trackers.wandb: needs the package wandb, which is not installed; install streamrl[trackers]"
    assert str(caught.value) == line
    check_trackers(Trackers())
