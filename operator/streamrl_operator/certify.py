"""Writes the certificates of a job that are due, as `tls_secrets.due` makes them."""

from dataclasses import dataclass
from datetime import datetime

from streamrl import names
from streamrl_operator import tls_secrets
from streamrl_operator.clock import OperatorClock
from streamrl_operator.clusters.registry import Members
from streamrl_operator.kube.cluster import CachedCluster
from streamrl_operator.kube.kinds import SECRET
from streamrl_operator.metrics import OperatorMetrics
from streamrl_operator.planning import members
from streamrl_operator.planning.certificates import Lives, roles_of
from streamrl_operator.planning.objects.shared import JobPlan
from streamrl_operator.planning.values import Object

_MAX_ROUNDS = 8
"""A change of CA takes three rounds at most in one reconcile; more would be an error of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certifier:
    """Keeps the Secrets with a job's certificates in order."""

    home: CachedCluster
    members: Members | None
    lives: Lives
    clock: OperatorClock
    metrics: OperatorMetrics

    async def certify(self, plan: JobPlan) -> datetime | None:
        """Apply the Secrets that are due, as far as that goes now; return when a certificate is due next."""
        roles = roles_of(plan.job)
        for _ in range(_MAX_ROUNDS):
            known = {
                name: secret
                for name in tls_secrets.secret_names(plan.name, roles=roles)
                if (secret := self.home.known(SECRET, plan.namespace, name)) is not None
            }
            lives = tls_secrets.lives_in(plan.name, known, roles=roles)
            self.metrics.certificates((plan.namespace, plan.name), lives)
            copies = self._copies(plan)
            made, next_check = tls_secrets.due(plan, known, now=self.clock.now(), lives=self.lives, copies=copies)
            if not made:
                return next_check
            for secret in made:  # one that we did not know of is looked at in the next round
                await self.home.find_or_make(secret, owner_uid=plan.uid)
                if secret["metadata"]["name"] in known:
                    await self.home.apply(secret)
        raise AssertionError(f"certificates of {plan.name} do not settle")

    def _copies(self, plan: JobPlan) -> dict[str, Object]:
        """Role -> the Secret with its leaf in a member, where one is known."""
        if self.members is None:
            return {}
        key = (plan.namespace, plan.name)
        found = {
            role: self.members.known(SECRET, cluster, key, names.tls_secret(plan.name, called))
            for cluster in members.clusters_of(plan.job)
            for role, called in members.leaves_in(plan.job, cluster).items()
        }
        return {role: secret for role, secret in found.items() if secret is not None}
