"""What a job is to have in member clusters, told to each of them: objects while it runs, no pods at its end, nothing after its deletion."""

from collections.abc import Mapping
from dataclasses import dataclass

from streamrl import names
from streamrl_operator import apply
from streamrl_operator.clusters.member import MemberWork
from streamrl_operator.clusters.registry import Members
from streamrl_operator.kube.cluster import CachedCluster
from streamrl_operator.kube.kinds import SECRET
from streamrl_operator.planning import job_status, members, pods
from streamrl_operator.planning.objects import plan_objects
from streamrl_operator.planning.objects.job_plan import plan_job
from streamrl_operator.planning.objects.members import anchor
from streamrl_operator.planning.objects.shared import MemberPlace, kept_claims
from streamrl_operator.planning.values import (
    JobDecision,
    MemberView,
    Object,
    Observed,
    PlanningSettings,
    trainer_cluster,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInMembers:
    """One job in all its members."""

    home: CachedCluster
    members: Members | None
    """None: no member is known, and none is told."""
    observed: Observed
    settings: PlanningSettings

    def remove(self) -> list[Object]:
        """Have the job removed from the members that it is in; return what stands for each that it is still in."""
        raw = self.observed.raw
        entries = job_status.read_job_status(raw).clusters
        waiting = [entry for entry in entries if not members.is_done(entry, self.observed)]
        kept, at = apply.kept_by_wish(raw), trainer_cluster(raw)
        for entry in waiting:
            there = kept if entry.name == at else frozenset[str]()
            self._want(entry.name, MemberWork(action="Remove", uid=self._uid, kept=there))
        return [{"kind": "what is in RLCluster", "metadata": {"name": entry.name}} for entry in waiting]

    def hand_over(self, decision: JobDecision) -> bool:
        """Tell each member what is to be there; return whether a status must be written before one may be told."""
        observed = self.observed
        entries = {entry.name: entry for entry in job_status.read_job_status(observed.raw).clusters}
        wanted, is_told_first = members.needed(observed), False
        stop, remove = (MemberWork(action=action, uid=self._uid) for action in ("Stop", "Remove"))
        for name, view in wanted.items():
            entry = entries.get(name)
            if entry is None or (view.cluster_uid and entry.cluster_uid != view.cluster_uid):
                is_told_first = True  # it is the memory of where we have been
            elif not view.cluster_uid or entry.namespace != view.namespace:
                continue  # nobody can be told yet, or what is there is elsewhere
            elif decision.has_ended or decision.stops_first:
                self._want(name, stop)
            elif (work := self._work(decision, view)) is not None:
                self._want(name, work)
            elif not decision.wanted.any_pods:  # fewer pods can always be had
                self._want(name, stop)
        for name in entries.keys() - wanted.keys():
            if observed.job is not None:
                self._want(name, remove)
            elif not decision.wanted.any_pods:
                self._want(name, stop)
        return is_told_first

    @property
    def _uid(self) -> str:
        return str(self.observed.metadata["uid"])

    def _want(self, cluster: str, work: MemberWork) -> None:
        if self.members is not None:
            self.members.want(cluster, self.observed.key, work)

    def _work(self, decision: JobDecision, view: MemberView) -> MemberWork | None:
        """All that the job is to have in a member; None while a leaf, the user's modules or the way to the scheduler are not known."""
        observed = self.observed
        assert observed.job is not None, "the member may be used"
        leaves: dict[str, Mapping[str, str]] = {}
        for role, called in members.leaves_in(observed.job, view.cluster).items():
            secret = self.home.known(SECRET, observed.key[0], names.tls_secret(observed.name, role))
            if secret is None:
                return None
            leaves[called] = secret["data"]
        place = MemberPlace(
            cluster=view.cluster, namespace=view.namespace, origin=view.origin, leaves=leaves, code=observed.code
        )
        plan = plan_job(observed, decision.wanted, settings=self.settings, place=place)
        if plan.has_trainer and plan.job.spec.task.code is not None and observed.code is None:
            return None
        if not plan.has_trainer and plan.dials is None:
            return None
        deleted = [
            pods.uid(pod)
            for pod in observed.pods
            if pods.cluster_of(pod) == view.cluster and pods.name(pod) in decision.delete_pods
        ]
        return MemberWork(
            action="Apply",
            uid=plan.uid,
            generation=observed.metadata.get("generation"),
            anchor=anchor(plan),
            objects=plan_objects(plan),
            kept=kept_claims(plan) if plan.has_trainer else frozenset(),
            delete_pods=frozenset(deleted),
        )
