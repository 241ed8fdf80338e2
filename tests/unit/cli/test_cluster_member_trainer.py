"""Commands about a job whose trainer is in a member: nothing of that name at home is taken for the job's."""

import argparse
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamrl import names
from streamrl.errors import UserError
from streamrl_cli.cluster import cancel, submit
from streamrl_cli.cluster.api import ApiClient
from streamrl_cli.jobfile import check_file
from streamrl_operator.kube.connections import ApiConnection
from streamrl_operator.kube.kinds import CLAIM, CONFIG_MAP, RLJOB, Kind
from support.api_server import ApiServer
from support.observed_jobs import JOB, job_document

NAMESPACE = "default"


@pytest.fixture
def server() -> ApiServer:
    return ApiServer()


@pytest.fixture
async def cluster(server: ApiServer) -> AsyncIterator[ApiClient]:
    async with server.client() as client, aclosing(ApiConnection(client.access, agent="test")) as connection:
        yield ApiClient(connection, context="home", namespace=NAMESPACE)


def stored(server: ApiServer, kind: Kind, name: str, document: dict[str, Any]) -> str:
    """Put it there; its path."""
    path = kind.path(NAMESPACE, name)
    metadata = {"name": name, "namespace": NAMESPACE, **document.get("metadata", {})}
    server.put(path, {"apiVersion": kind.api_version, "kind": kind.kind, **document, "metadata": metadata})
    return path


@pytest.mark.parametrize("when_deleted", ["Delete", "Retain"])
async def test_cancel_leaves_a_claim_of_its_name_at_home_alone(
    server: ApiServer, cluster: ApiClient, when_deleted: str
) -> None:
    document = job_document()
    document["spec"]["trainer"]["clusterName"] = "east"
    document["spec"]["storage"] = {"checkpoints": {"whenDeleted": when_deleted}}
    job = stored(server, RLJOB, JOB, document)
    claim = stored(server, CLAIM, names.checkpoints_claim(JOB), {})
    found, keep = cancel._checkpoints(server.objects[job], keep=None)
    await cancel._delete(server.objects[job], found, keep=keep, cluster=cluster)
    merged = [f"PATCH {job}"] if when_deleted == "Retain" else []
    assert server.writes == [*merged, f"DELETE {job}"]
    assert claim in server.objects


@pytest.mark.parametrize(("at", "is_refused"), [("east", True), (None, False)], ids=["in a member", "at home"])
async def test_code_that_was_copied_to_a_member_is_not_changed_by_force(
    server: ApiServer, cluster: ApiClient, tmp_path: Path, at: str | None, *, is_refused: bool
) -> None:
    document = job_document()
    document["metadata"] = {"name": JOB}
    document["spec"]["trainer"] |= {"clusterName": at} if at else {}
    (tmp_path / "prompts.jsonl").write_text("new")
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(document))
    stored(server, RLJOB, JOB, document)
    code = stored(server, CONFIG_MAP, f"{JOB}-code", {"data": {"prompts.jsonl": "old"}})
    before = server.objects[code]
    jobs, mistakes = check_file(file)
    assert not mistakes
    args = argparse.Namespace(file=file, force=True, dry_run=False, follow=False)
    if is_refused:
        with pytest.raises(UserError, match=r"prompts\.jsonl cannot be changed.*; make a new job$"):
            await submit._apply(jobs[0], args, cluster=cluster)
    else:
        await submit._apply(jobs[0], args, cluster=cluster)
    assert (server.objects[code] == before) is is_refused
