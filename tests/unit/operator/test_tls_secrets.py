"""Certificates of a job: what is due by tables, a whole change of CA in virtual time, and what stands in the certificates.

Legend: names of CAs stand for fingerprints; days are counted from the begin.
"""

import base64
import copy
import ssl
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509

from streamrl import names
from streamrl.spec import parse_job
from streamrl_operator import tls_secrets
from streamrl_operator.planning.certificates import (
    ROLES,
    Action,
    Ca,
    Leaf,
    Lives,
    NewCa,
    Promote,
    Seen,
    WriteLeaf,
    plan_certificates,
    roles_of,
)
from streamrl_operator.planning.objects.shared import JobPlan
from streamrl_operator.planning.values import DesiredRun, PlanningSettings
from streamrl_operator.tls_secrets import Holder, KeyPair

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
LIVES = Lives(ca_s=90 * 86_400, leaf_s=30 * 86_400, settle_s=600)
OLD, NEW = "old", "new"


def day(number: float) -> datetime:
    """A moment."""
    return BEGIN + timedelta(days=number)


def ca(name: str, begin: float = 0) -> Ca:
    """A CA of 90 days: its change is due on the 60th."""
    return Ca(fingerprint=name, not_before=day(begin), not_after=day(begin + 90))


def leaf(signer: str, *trusts: str, begin: float = 0, changed: float | None = None) -> Leaf:
    """A leaf of 30 days: its renewal is due on the 20th."""
    return Leaf(
        signer=signer,
        trusts=trusts or (signer,),
        not_before=day(begin),
        not_after=day(begin + 30),
        changed=day(begin if changed is None else changed),
    )


def seen(present: Ca | None, following: Ca | None = None, **leaves: Leaf | None) -> Seen:
    """As found; roles that are not named are like the trainer's, or not there."""
    every = dict.fromkeys(ROLES, leaves.get("all"))
    return Seen(present=present, next=following, leaves=every | {k: v for k, v in leaves.items() if k != "all"})


def write(role: str, signer: Any, *trusts: Any) -> WriteLeaf:
    """Shorter."""
    return WriteLeaf(role=role, signer=signer, trusts=trusts)


def each(signer: Any, *trusts: Any) -> list[Action]:
    """The same for all roles."""
    return [write(role, signer, *trusts) for role in ROLES]


BOTH = (OLD, NEW)
TABLE: dict[str, tuple[Seen, float, list[Action], float | None]] = {
    "in order: looked at again when the first leaf is due": (seen(ca(OLD), all=leaf(OLD)), 1, [], 20),
    "the CA is due before the leaves": (seen(ca(OLD), all=leaf(OLD, begin=50)), 51, [], 60),
    "one leaf is gone": (
        seen(ca(OLD), all=leaf(OLD), trainer=None),
        1,
        [write("trainer", "present", "present")],
        None,
    ),
    "a leaf of a CA that is lost": (
        seen(ca(NEW), all=leaf(NEW), generator=leaf("", OLD)),
        1,
        [write("generator", "present", "present")],
        None,
    ),
    "the CA is lost: all is made new": (seen(None, all=leaf(OLD)), 1, [NewCa(place="present")], None),
    "the CA has ended": (seen(ca(OLD), all=leaf(OLD)), 90, [NewCa(place="present")], None),
    "the CA has ended in the middle of its change": (seen(ca(OLD), ca(NEW, 60)), 90, [Promote()], None),
    "step 1: the CA at two thirds": (seen(ca(OLD), all=leaf(OLD, begin=50)), 60, [NewCa(place="next")], None),
    "the next CA has ended unused": (
        seen(ca(OLD, 100), ca(NEW), all=leaf(OLD, begin=150)),
        160,
        [NewCa(place="next")],
        None,
    ),
    "step 2: the one that does not yet": (
        seen(ca(OLD), ca(NEW, 60), all=leaf(OLD, *BOTH, begin=50, changed=60), scheduler=leaf(OLD, begin=50)),
        61,
        [write("scheduler", None, "present", "next")],
        None,
    ),
    "step 2: a leaf that is due is renewed by the present CA": (
        seen(ca(OLD), ca(NEW, 60), all=leaf(OLD, *BOTH, begin=40, changed=60)),
        60.001,
        each("present", "present", "next"),
        None,
    ),
    "between 2 and 3: not everybody has read it": (
        seen(ca(OLD), ca(NEW, 60), all=leaf(OLD, *BOTH, begin=50, changed=60)),
        60.001,
        [],
        60 + 600 / 86_400,
    ),
    "step 3: swap": (
        seen(ca(OLD), ca(NEW, 60), all=leaf(OLD, *BOTH, begin=50, changed=60)),
        60.01,
        each("next", "present", "next"),
        None,
    ),
    "step 3: interrupted after the first": (
        seen(ca(OLD), ca(NEW, 60), all=leaf(OLD, *BOTH, begin=50, changed=60), scheduler=leaf(NEW, *BOTH, begin=60.01)),
        60.011,
        [write("trainer", "next", "present", "next"), write("generator", "next", "present", "next")],
        None,
    ),
    "step 3: a leaf is lost in the middle": (
        seen(ca(OLD), ca(NEW, 60), all=leaf(NEW, *BOTH, begin=60.01), trainer=None),
        60.011,
        [write("trainer", "next", "present", "next")],
        None,
    ),
    "between 3 and 4": (
        seen(ca(OLD), ca(NEW, 60), all=leaf(NEW, *BOTH, begin=60.01)),
        60.011,
        [],
        60.01 + 600 / 86_400,
    ),
    "step 4: the next becomes the present": (
        seen(ca(OLD), ca(NEW, 60), all=leaf(NEW, *BOTH, begin=60.01)),
        60.02,
        [Promote()],
        None,
    ),
    "step 4: nobody trusts the old one any more": (
        seen(ca(NEW, 60), all=leaf(NEW, *BOTH, begin=60.01)),
        60.02,
        each(None, "present"),
        None,
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_what_is_due(case: str) -> None:
    found, at, actions, again = TABLE[case]
    due = plan_certificates(found, now=day(at), lives=LIVES)
    assert list(due.actions) == actions
    assert due.next_check == (None if again is None else day(again))


# ---- The Secrets, with real certificates.

JOB = parse_job(
    {
        "apiVersion": "streamrl.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "sums", "namespace": "lab"},
        "spec": {
            "model": {"scratch": {}},
            "task": {
                "dataset": {"reasoningGym": {"name": "chain_sum"}},
                "sampling": {"maxTokens": 64},
                "rewards": [{"name": "answer", "verifier": {}}],
            },
            "pipeline": {"batchGroups": 8, "steps": 10},
            "generators": [{"name": "a", "engine": {"hf": {}}}],
        },
    }
)
PLAN = JobPlan(
    job=JOB,
    namespace="lab",
    uid="0f3c",
    wanted=DesiredRun(trainers=1, generators={"a": 1}),
    settings=PlanningSettings(namespace="streamrl", trainer_image="t", generator_image="g"),
)
Secrets = dict[str, dict[str, Any]]


def settle(stored: Secrets, now: datetime) -> tuple[int, datetime]:
    """Write what is due until nothing is; writes, and when to look again."""
    writes = 0
    for _ in range(8):
        made, again = tls_secrets.due(PLAN, stored, now=now, lives=LIVES)
        if not made:
            assert again is not None
            return writes, again
        stored |= {secret["metadata"]["name"]: secret for secret in made}
        writes += len(made)
    raise AssertionError("does not settle")


def part(stored: Secrets, name: str, key: str) -> bytes:
    """A value of a Secret."""
    return base64.b64decode(stored[name]["data"][key])


def certificate(stored: Secrets, role: str) -> x509.Certificate:
    """A role's."""
    return x509.load_pem_x509_certificate(part(stored, names.tls_secret("sums", role), "tls.crt"))


def trusts(stored: Secrets, holder: str, shown: str) -> bool:
    """Whether one role, with the files that it has, believes another's certificate."""
    bundle = tls_secrets.read_trusted(part(stored, names.tls_secret("sums", holder), "ca.crt"))
    return bool(tls_secrets.signer_of(certificate(stored, shown), bundle))


def test_first_secrets() -> None:
    stored: Secrets = {}
    writes, again = settle(stored, BEGIN)
    assert writes == 4
    assert set(stored) == set(tls_secrets.secret_names("sums"))
    assert set(stored["sums-ca"]["data"]) == {"ca.crt", "ca.key"}
    assert all(set(stored[f"sums-tls-{role}"]["data"]) == {"ca.crt", "tls.crt", "tls.key"} for role in ROLES)
    assert all(secret["metadata"]["ownerReferences"][0]["uid"] == "0f3c" for secret in stored.values())
    assert {stored[f"sums-tls-{role}"]["type"] for role in ROLES} == {"kubernetes.io/tls"}
    # Two thirds of a leaf's life, which began five minutes before it was made.
    assert timedelta(days=19, hours=23) < again - BEGIN < timedelta(days=20)
    assert settle(stored, BEGIN) == (0, again)


def far_plan() -> JobPlan:
    """The same job with its pool in a member."""
    document = JOB.model_dump(mode="json", by_alias=True, exclude_none=True)
    document["spec"]["generators"][0]["clusterName"] = "east"
    return replace(PLAN, job=parse_job(document))


def settle_far(stored: Secrets, now: datetime, *, copies: Secrets | None = None) -> None:
    for _ in range(8):
        made, _ = tls_secrets.due(far_plan(), stored, now=now, lives=LIVES, copies=copies)
        if not made:
            return
        stored |= {secret["metadata"]["name"]: secret for secret in made}
    raise AssertionError("does not settle")


FAR = "sums-tls-generator-east"


def test_a_member_has_a_leaf_of_its_own_and_servers_the_names_that_it_demands() -> None:
    stored: Secrets = {}
    settle_far(stored, BEGIN)
    assert set(stored) == set(tls_secrets.secret_names("sums", roles=roles_of(far_plan().job)))
    found = {name: _alternative_names(stored, name) for name in stored if name != "sums-ca"}
    assert found[FAR] == ["streamrl://lab/sums/generator/east"]
    assert "scheduler.0f3c.streamrl.internal" in found["sums-tls-scheduler"]
    assert "weights.0f3c.streamrl.internal" in found["sums-tls-trainer"]
    assert not any("internal" in name for name in found["sums-tls-generator"])


def _alternative_names(stored: Secrets, name: str) -> list[str]:
    leaf = x509.load_pem_x509_certificate(part(stored, name, "tls.crt"))
    return [str(one.value) for one in leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value]


def test_a_job_that_gets_a_pool_in_a_member_shows_the_names_from_then_on() -> None:
    stored: Secrets = {}
    settle(stored, BEGIN)
    settle_far(stored, BEGIN)
    assert "scheduler.0f3c.streamrl.internal" in _alternative_names(stored, "sums-tls-scheduler")


def test_a_change_of_the_authority_waits_for_a_member_that_is_behind() -> None:
    stored: Secrets = {}
    settle_far(stored, BEGIN)
    now = BEGIN + timedelta(days=61)
    copy = stored[FAR] | {"data": dict(stored[FAR]["data"])}
    good = replace_leaf_life(stored, now)
    for minutes in range(0, 300, 30):
        settle_far(stored, now + timedelta(minutes=minutes), copies={"generator/east": good})
    assert "next.crt" in stored["sums-ca"]["data"], "the old authority is there still"
    for minutes in range(300, 600, 30):
        settle_far(stored, now + timedelta(minutes=minutes), copies={"generator/east": copy})
    assert "next.crt" not in stored["sums-ca"]["data"], "a copy that has expired is of no use to anybody"


def replace_leaf_life(stored: Secrets, now: datetime) -> dict[str, Any]:
    """The member's Secret with a leaf that is good at `now` and is not the one that home has."""
    authority = KeyPair(certificate=part(stored, "sums-ca", "ca.crt"), key=part(stored, "sums-ca", "ca.key"))
    holder = Holder(namespace="lab", job="sums", role="generator/east", uid="0f3c")
    leaf = tls_secrets.new_leaf(holder, ca=authority, now=now - timedelta(days=1), lives=LIVES)
    encoded = {"tls.crt": base64.b64encode(leaf.certificate).decode(), "tls.key": base64.b64encode(leaf.key).decode()}
    return stored[FAR] | {"data": stored[FAR]["data"] | encoded}


def test_names_in_leaves() -> None:
    stored: Secrets = {}
    settle(stored, BEGIN)
    server = certificate(stored, "scheduler").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert server.get_values_for_type(x509.UniformResourceIdentifier) == ["streamrl://lab/sums/scheduler"]
    assert server.get_values_for_type(x509.DNSName) == [
        "sums-scheduler",
        "sums-scheduler.lab",
        "sums-scheduler.lab.svc",
        "sums-scheduler.lab.svc.cluster.local",
        "*.sums-trainer.lab",
        "*.sums-trainer.lab.svc",
        "*.sums-trainer.lab.svc.cluster.local",
        "localhost",
    ]
    client = certificate(stored, "generator").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert client.get_values_for_type(x509.UniformResourceIdentifier) == ["streamrl://lab/sums/generator"]
    assert client.get_values_for_type(x509.DNSName) == []  # it serves nobody, and must not pass for the scheduler


def test_openssl_believes_them(tmp_path: Any) -> None:
    stored: Secrets = {}
    settle(stored, datetime.now(UTC))
    for role in ("scheduler", "generator"):
        (tmp_path / f"{role}.pem").write_bytes(
            part(stored, f"sums-tls-{role}", "tls.crt") + part(stored, f"sums-tls-{role}", "tls.key")
        )
    ca_pem = part(stored, "sums-tls-trainer", "ca.crt").decode()
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=ca_pem)
    server.verify_mode = ssl.CERT_REQUIRED
    server.load_cert_chain(tmp_path / "scheduler.pem")
    client = ssl.create_default_context(cadata=ca_pem)
    client.load_cert_chain(tmp_path / "generator.pem")
    assert shake_hands(server, client, "sums-scheduler.lab.svc") == "generator"
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake_hands(server, client, "other-scheduler.lab.svc")


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> str:
    """A TLS handshake in memory; the role of the client as the server sees it."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(down, up, server_hostname=host),
        server.wrap_bio(up, down, server_side=True),
    ]
    waiting = set(ends)
    for _ in range(8):
        for end in list(waiting):
            try:
                end.do_handshake()
                waiting.discard(end)
            except ssl.SSLWantReadError:
                pass
    assert not waiting
    shown = ends[1].getpeercert()
    assert shown is not None
    return next(value for kind, value in shown["subjectAltName"] if kind == "URI").rpartition("/")[2]


def test_a_whole_change_of_ca_breaks_no_trust() -> None:
    stored: Secrets = {}
    now, writes = BEGIN, 0
    changes = set()
    previous: list[Secrets] = []
    while now < day(200):
        made, again = settle(stored, now)
        writes += made
        changes.add(part(stored, "sums-ca", "ca.crt"))
        # A process may still have the files of one step before: everybody believes everybody, old files and new.
        for before in previous[-1:]:
            for holder in ROLES:
                assert all(trusts(before, holder, role) for role in ROLES)
                mixed = stored | {names.tls_secret("sums", holder): before[names.tls_secret("sums", holder)]}
                assert all(trusts(mixed, holder, role) for role in ROLES), now
                assert all(trusts(mixed, role, holder) for role in ROLES), now
        assert all(certificate(stored, role).not_valid_after_utc > now for role in ROLES)
        previous.append(copy.deepcopy(stored))
        assert again > now
        now = again
    assert len(changes) == 4  # the first, and one every 60 days
    assert set(stored["sums-ca"]["data"]) == {"ca.crt", "ca.key"}
    assert writes < 120  # about 3 leaves in 20 days, and 13 writes for a change


@pytest.mark.parametrize(
    ("secret", "change"),
    [
        ("sums-tls-trainer", {"data": {}}),
        ("sums-tls-trainer", {"data": {"tls.crt": "bm9uc2Vuc2U=", "tls.key": "bm9uc2Vuc2U=", "ca.crt": "***"}}),
        ("sums-tls-scheduler", {"metadata": {"name": "sums-tls-scheduler"}}),
    ],
)
def test_what_somebody_broke_is_made_again(secret: str, change: dict[str, Any]) -> None:
    stored: Secrets = {}
    settle(stored, BEGIN)
    before = copy.deepcopy(stored)
    stored[secret] = {**stored[secret], **change}
    writes, _ = settle(stored, day(1))
    assert writes == 1
    assert stored[secret]["data"].keys() == before[secret]["data"].keys()
    assert all(trusts(stored, holder, shown) for holder in ROLES for shown in ROLES)


def test_labels_that_somebody_removed_come_back_without_new_keys() -> None:
    stored: Secrets = {}
    settle(stored, BEGIN)
    key = part(stored, "sums-tls-trainer", "tls.key")
    del stored["sums-tls-trainer"]["metadata"]["labels"][names.LABEL_JOB]
    assert settle(stored, day(1))[0] == 1
    assert stored["sums-tls-trainer"]["metadata"]["labels"][names.LABEL_JOB] == "sums"
    assert part(stored, "sums-tls-trainer", "tls.key") == key


def test_a_leaf_with_other_names_is_made_again() -> None:
    stored: Secrets = {}
    settle(stored, BEGIN)
    pair = KeyPair(certificate=part(stored, "sums-ca", "ca.crt"), key=part(stored, "sums-ca", "ca.key"))
    other = Holder(namespace="lab", job="sums", role="trainer")
    wrong = tls_secrets.new_leaf(other, ca=pair, now=BEGIN, lives=LIVES)
    stored["sums-tls-generator"]["data"] |= {
        "tls.crt": base64.b64encode(wrong.certificate).decode(),
        "tls.key": base64.b64encode(wrong.key).decode(),
    }
    assert settle(stored, day(1))[0] == 1
    assert trusts(stored, "scheduler", "generator")


def test_a_leaf_never_outlives_its_ca() -> None:
    lives = Lives(ca_s=3600, leaf_s=7200, settle_s=1)
    pair = tls_secrets.new_ca("sums", now=BEGIN, lives=lives)
    made = tls_secrets.new_leaf(Holder(namespace="lab", job="sums", role="trainer"), ca=pair, now=BEGIN, lives=lives)
    read = tls_secrets.read(made)
    assert read is not None
    assert read.not_valid_after_utc == BEGIN + timedelta(seconds=3600)
