"""What is due for a job's certificates: decided from what is there, with the clock as a parameter.

A job has one certificate authority (CA) and a leaf for each role; every Secret of a leaf also holds the CAs that its holder trusts.
Leaves are renewed at two thirds of their life by the same CA. A CA is changed in steps, each of which is seen in the Secrets:

    1  a next CA lies beside the present one          (the present one is at two thirds of its life)
    2  every leaf's Secret trusts both
    3  `settle_s` later every leaf is of the next CA  (by then every process has read the Secret again)
    4  `settle_s` later the next CA is the present one, the old one is dropped, and nobody trusts it any more

So at no moment does a process show a leaf that a peer with up-to-date files does not trust. Does not own: keys, encodings, Secrets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from streamrl import names
from streamrl.spec import RLJob
from streamrl_operator.planning.members import TRAINER_ROLES, pool_clusters

ROLES = (*TRAINER_ROLES, "generator")
"""Of every job; a job with pools in member clusters has a role more for each (`names.generator_role`), one with a pool of agents theirs."""

Signer = Literal["present", "next"]


def roles_of(job: RLJob) -> tuple[str, ...]:
    """Who has a leaf in a job."""
    agents = () if job.spec.agent_pool is None else (names.AGENTS,)
    return (*ROLES, *agents, *(names.generator_role(cluster) for cluster in pool_clusters(job)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lives:
    """How long things last."""

    ca_s: float = 365 * 86_400.0
    leaf_s: float = 30 * 86_400.0
    settle_s: float = 600.0
    """Until every process has seen a change of its Secret: kubelet's sync (up to two minutes) and the process's own look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ca:
    """A certificate authority whose certificate and key were read and belong together."""

    fingerprint: str
    not_before: datetime
    not_after: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A role's Secret, as far as it is sound: key and certificate belong together, the names in it are the role's."""

    signer: str
    """Fingerprint of the CA that signed it, of those in `trusts`; empty: none of them."""
    trusts: tuple[str, ...]
    """Fingerprints of the CAs that its holder trusts, in the order of the file."""
    not_before: datetime
    not_after: datetime
    changed: datetime
    """When we last wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The certificates of a job; None: not there, or not sound."""

    present: Ca | None = None
    next: Ca | None = None
    leaves: Mapping[str, Leaf | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCa:
    """Make a CA: the first, or (as `next`) the one to change to."""

    place: Signer


@dataclass(frozen=True, slots=True, kw_only=True)
class Promote:
    """The next CA becomes the present one, which is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteLeaf:
    """Write a role's Secret with trust in the CAs of `trusts`; with a new key and certificate of `signer`, or the ones it has."""

    role: str
    signer: Signer | None
    trusts: tuple[Signer, ...]


Action = NewCa | Promote | WriteLeaf


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """What is to be done now, in this order, and when to look again."""

    actions: Sequence[Action]
    next_check: datetime | None = None
    """None: after the actions."""


def plan_certificates(seen: Seen, *, now: datetime, lives: Lives) -> Due:
    """What is due. Actions on a CA stand alone: the leaves are looked at when the CA is there."""
    if seen.present is None or now >= seen.present.not_after:
        is_followed = seen.next is not None and now < seen.next.not_after
        return Due(actions=(Promote() if is_followed else NewCa(place="present"),))
    if seen.next is None or now >= seen.next.not_after:
        renewal = _renewal(seen.present.not_before, seen.present.not_after)
        if now >= renewal:
            return Due(actions=(NewCa(place="next"),))
        return _leaves(seen, now=now, signer="present", trusts=("present",), also=renewal)
    return _change(seen, present=seen.present, following=seen.next, now=now, settle=timedelta(seconds=lives.settle_s))


def _change(seen: Seen, *, present: Ca, following: Ca, now: datetime, settle: timedelta) -> Due:
    """Steps 2 to 4: as far as all leaves have come. Once one is of the next CA, all trust both and the rest follow."""
    both: tuple[Signer, ...] = ("present", "next")
    wanted = (present.fingerprint, following.fingerprint)
    leaves = [leaf for leaf in seen.leaves.values() if leaf is not None]
    settled = max((leaf.changed for leaf in leaves), default=now) + settle
    all_trust_both = len(leaves) == len(seen.leaves) and all(leaf.trusts == wanted for leaf in leaves)
    begun = any(leaf.signer == following.fingerprint for leaf in leaves)
    swapped = all_trust_both and all(leaf.signer == following.fingerprint for leaf in leaves)
    if swapped and now >= settled:
        return Due(actions=(Promote(),))
    signer: Signer = "next" if begun or (all_trust_both and now >= settled) else "present"
    return _leaves(seen, now=now, signer=signer, trusts=both, also=settled)


def _leaves(seen: Seen, *, now: datetime, signer: Signer, trusts: tuple[Signer, ...], also: datetime | None) -> Due:
    """Bring every leaf to this signer and this trust; renew those that are at two thirds of their life."""
    cas = {"present": seen.present, "next": seen.next}
    wanted = tuple(ca.fingerprint for ca in (cas[place] for place in trusts) if ca is not None)
    signing = cas[signer]
    assert signing is not None, "a leaf is signed by a CA that is there"
    actions: list[Action] = []
    times = [also] if also is not None else []
    for role, leaf in seen.leaves.items():
        renewal = _renewal(leaf.not_before, leaf.not_after) if leaf else now
        if leaf is None or now >= renewal or leaf.signer != signing.fingerprint:
            actions.append(WriteLeaf(role=role, signer=signer, trusts=trusts))
        elif leaf.trusts != wanted:
            actions.append(WriteLeaf(role=role, signer=None, trusts=trusts))
        times.append(renewal)
    return Due(actions=tuple(actions), next_check=None if actions else min(times))


def _renewal(not_before: datetime, not_after: datetime) -> datetime:
    return not_before + (not_after - not_before) * 2 / 3
