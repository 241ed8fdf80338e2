"""A generator in a member dials home: with the certificates that the operator makes, by the names that it is told, and by no others."""

import base64
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from streamrl import names
from streamrl.spec import parse_job
from streamrl_operator import tls_secrets
from streamrl_operator.planning.certificates import Lives
from streamrl_operator.planning.objects.shared import JobPlan
from streamrl_operator.planning.values import DesiredRun
from streamrl_workers.stream.channel import ConnectTimeoutError, bind, connect, make_server
from streamrl_workers.stream.tls import Tls
from support.jobs import simulated_job
from support.observed_jobs import SETTINGS

UID = "0f3c9c52-6a3b-4e0e-9d3e-0c7f7f0f1a11"
SCHEDULER, WEIGHTS = names.tls_name("scheduler", uid=UID), names.tls_name("weights", uid=UID)
CONNECT_S, REFUSED_S = 60.0, 2.0
Secrets = dict[str, dict[str, Any]]
LIVES = Lives(ca_s=365 * 86_400, leaf_s=365 * 86_400, settle_s=600)
"""A leaf that lives as long as its authority is good by its dates when that is changed."""


def secrets(*, uid: str = UID, stored: Secrets | None = None, now: datetime | None = None) -> Secrets:
    """All of a job with its pool in member `east`, as an operator leaves them."""
    document = simulated_job()
    document["spec"]["generators"][0]["clusterName"] = "east"
    wanted = DesiredRun(trainers=1, generators={})
    plan = JobPlan(job=parse_job(document), namespace="team", uid=uid, wanted=wanted, settings=SETTINGS)
    found: Secrets = {} if stored is None else stored
    while made := tls_secrets.due(plan, found, now=now or datetime.now(UTC), lives=LIVES)[0]:
        found |= {secret["metadata"]["name"]: secret for secret in made}
    return found


def files(folder: Path, stored: Secrets, role: str) -> Path:
    """A role's Secret as it is mounted."""
    folder.mkdir(parents=True)
    for name, data in stored[names.tls_secret("simulated", role)]["data"].items():
        (folder / name).write_bytes(base64.b64decode(data))
    return folder


@pytest.fixture
def stored() -> Secrets:
    """Of the job that is served."""
    return secrets()


@pytest.fixture
async def address(tmp_path: Path, stored: Secrets) -> AsyncIterator[str]:
    """Of a server with the scheduler's leaf."""
    tls = Tls(files(tmp_path / "scheduler", stored, "scheduler"))
    server = make_server(token="", tls=tls)
    bound = bind(server, port=0, tls=tls)
    await server.start()
    yield bound
    await server.stop(None)


async def dial(address: str, folder: Path, *, server_name: str, timeout_s: float = CONNECT_S) -> None:
    """Connect, and go again."""
    channel = await connect(address, timeout_s=timeout_s, who="home", tls=Tls(folder, server_name=server_name))
    await channel.close()


async def test_a_generator_in_a_member_demands_the_jobs_own_name(address: str, stored: Secrets, tmp_path: Path) -> None:
    folder = files(tmp_path / "east", stored, names.generator_role("east"))
    identity = Tls(folder).identity
    assert (identity.role, identity.cluster) == ("generator", "east")
    await dial(address, folder, server_name=SCHEDULER)


@pytest.mark.parametrize("server_name", [WEIGHTS, names.tls_name("scheduler", uid="ffffffff")])
async def test_another_name_is_not_believed(address: str, stored: Secrets, tmp_path: Path, server_name: str) -> None:
    folder = files(tmp_path / "east", stored, names.generator_role("east"))
    with pytest.raises(ConnectTimeoutError):
        await dial(address, folder, server_name=server_name, timeout_s=REFUSED_S)


async def test_another_jobs_leaf_is_refused(address: str, tmp_path: Path) -> None:
    folder = files(tmp_path / "other", secrets(), names.generator_role("east"))
    with pytest.raises(ConnectTimeoutError):
        await dial(address, folder, server_name=SCHEDULER, timeout_s=REFUSED_S)


async def test_a_leaf_of_an_authority_that_was_rotated_out_is_refused(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    stored = secrets(now=now - timedelta(days=250))
    old = files(tmp_path / "old", stored, names.generator_role("east"))
    for hours in range(7, 0, -1):  # each step of the change waits for ten minutes
        secrets(stored=stored, now=now - timedelta(hours=hours))
    new = files(tmp_path / "east", stored, names.generator_role("east"))
    tls = Tls(files(tmp_path / "new", stored, "scheduler"))
    server = make_server(token="", tls=tls)
    bound = bind(server, port=0, tls=tls)
    await server.start()
    try:
        await dial(bound, new, server_name=SCHEDULER)
        with pytest.raises(ConnectTimeoutError):
            await dial(bound, old, server_name=SCHEDULER, timeout_s=REFUSED_S)
    finally:
        await server.stop(None)
