"""Whether all of a job could run, asked of the API server before anything of it takes a GPU.

    StatefulSets, claims, PodGroup ──dry run──▶ taken?      then all else of the job is made, and
    what the pods name             ──exists?──▶ there?      a pod of each template ──dry run──▶ taken?      all pods ──quotas──▶ room?

A StatefulSet is taken where its pods are not: Pod Security, classes, LimitRanges and quotas look at pods. Nothing here changes anything.
Owns: what is asked, and how a lack is worded. Does not own: when it is asked, and what a lack holds up (`apply.py`).
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from streamrl_operator.events import Refusal
from streamrl_operator.kube.answers import ConflictError, ForbiddenError, KubeError, NotFoundError, RequestRefusedError
from streamrl_operator.kube.cluster import CachedCluster, NameTakenError, ObjectMissingError
from streamrl_operator.kube.kinds import CLAIM, CONFIG_MAP, POD, POD_GROUPS, QUOTA, SECRET, STATEFUL_SET, Kind, of
from streamrl_operator.planning.compare import differs, with_claim_kept
from streamrl_operator.planning.demands import named_objects, quota_lack
from streamrl_operator.planning.values import Object

_KINDS: Mapping[str, Kind] = {kind.kind: kind for kind in (CONFIG_MAP, SECRET, CLAIM)}
_NO_DRY_RUN = "does not support dry run"
"""Of a webhook that must not be asked so: it is asked when the object is made."""


@dataclass(slots=True, kw_only=True)
class StartCheck:
    """The questions about one job in one cluster."""

    cluster: CachedCluster
    owner_uid: str
    counts: Mapping[str, int] = field(default_factory=dict)
    """StatefulSet -> pods without which the job is of no use."""
    is_start: bool = False
    """Whether no pod of the job is asked for yet, in any cluster, and some are to come."""
    is_home: bool = True
    """In a member only objects are asked for: the operator may not read others there, nor make pods."""
    warnings: list[str] = field(default_factory=list)
    """Of the API server, each once."""
    was_asked: bool = False

    async def check_objects(self, desired: Sequence[Object]) -> list[Refusal]:
        """Ask for each StatefulSet, claim and PodGroup, and for what the pods name."""
        self.was_asked = True
        asked = [obj for obj in desired if of(obj) in (STATEFUL_SET, CLAIM, *POD_GROUPS.values())]
        refused = [error for obj in asked if (error := await self._try(obj)) is not None]
        return refused + (await self._missing(desired) if self.is_home else [])

    async def check_pods(self, sets: Sequence[Object]) -> list[Refusal]:
        """Ask for a pod of each template, and compare all of them with the quotas."""
        refused: list[Refusal] = []
        admitted: list[tuple[int, Object]] = []
        for obj in sets if self.is_home else ():
            try:
                admitted.append((self.counts.get(obj["metadata"]["name"], 0), await self._try_pod(obj)))
            except RequestRefusedError as error:
                refused.append(error)
        if refused or not admitted:
            return refused
        return await self._beyond_quota(admitted, namespace=sets[0]["metadata"]["namespace"])

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    async def _try(self, obj: Object) -> Refusal | None:
        try:
            found = self.cluster.find(obj, owner_uid=self.owner_uid)
            obj = with_claim_kept(obj, found)
            if found is None or differs(obj, found):
                await self.cluster.try_apply(obj, owner_uid=self.owner_uid, is_new=found is None, warned=self._warn)
        except NameTakenError as error:
            return error
        except (NotFoundError, RequestRefusedError) as error:
            if of(obj) in POD_GROUPS.values() and isinstance(error, NotFoundError | ForbiddenError):
                return _no_pod_groups(obj, error)
            if isinstance(error, NotFoundError):
                raise
            return None if _NO_DRY_RUN in error.message else error
        return None

    async def _missing(self, desired: Sequence[Object]) -> list[Refusal]:
        made = {(obj["kind"], obj["metadata"]["name"]) for obj in desired}
        sets = [obj for obj in desired if of(obj) is STATEFUL_SET]
        users = {
            named: f"StatefulSet {obj['metadata']['name']}"
            for obj in reversed(sets)
            for named in named_objects(obj["spec"]["template"]["spec"])
        }
        namespace = desired[0]["metadata"]["namespace"]
        asked = sorted(users.keys() - made)
        found = await asyncio.gather(*(self._is_there(kind, namespace, name) for kind, name in asked))
        return [
            ObjectMissingError(kind=kind, name=name, user=users[kind, name])
            for (kind, name), is_there in zip(asked, found, strict=True)
            if not is_there
        ]

    async def _is_there(self, kind: str, namespace: str, name: str) -> bool:
        if self.cluster.known(_KINDS[kind], namespace, name) is not None:
            return True
        return await self.cluster.client.exists(_KINDS[kind], namespace=namespace, name=name)

    async def _try_pod(self, stateful_set: Object) -> Object:
        """The pod as it would be admitted; where that cannot be asked, as it is planned. A refusal has the same words each time: its name is fixed."""
        template, about = stateful_set["spec"]["template"], stateful_set["metadata"]
        metadata = {**template["metadata"], "name": f"{about['name']}-0", "namespace": about["namespace"]}
        spec = {key: value for key, value in template["spec"].items() if key != "schedulingGates"}
        pod = {"apiVersion": POD.api_version, "kind": POD.kind, "metadata": metadata, "spec": spec}
        try:
            return await self.cluster.client.try_out(POD, pod, warned=self._warn)
        except ConflictError:  # one of before still ends
            return pod
        except RequestRefusedError as error:
            if _NO_DRY_RUN in error.message:
                return pod
            raise

    async def _beyond_quota(self, admitted: Sequence[tuple[int, Object]], *, namespace: str) -> list[Refusal]:
        quotas = [quota async for page, _ in self.cluster.client.list(QUOTA, namespace=namespace) for quota in page]
        lack = quota_lack(quotas, [(count, pod["spec"]) for count, pod in admitted])
        path = QUOTA.path(namespace)
        return [RequestRefusedError(f"compare {path}", status=403, reason="Forbidden", message=lack)] if lack else []


def _no_pod_groups(obj: Object, error: KubeError) -> RequestRefusedError:
    fix = "install its scheduler and set gangs.enabled of the chart, or leave gang.podGroup out"
    message = f"gang.podGroup: the operator can have no PodGroup of {obj['apiVersion']} here: {fix}"
    return RequestRefusedError("apply PodGroup", status=error.status, reason=error.reason, message=message)
