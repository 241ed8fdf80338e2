"""NetworkPolicies: who reaches whom. gRPC is for pods of the job alone; signals are numbers and open to all.

The signals ports have no `from`: requests through the API server's proxy come from an address that differs by cluster.
"""

from streamrl import names
from streamrl.spec.generators import GeneratorPool
from streamrl_operator.planning.objects.meta import Built, Plan
from streamrl_operator.planning.pods import ROLE_GENERATOR, ROLE_TRAINER, ROLE_TRAINER_WORKER

_PORT_DNS = 53


def trainer_policy(plan: Plan) -> Built:
    """The trainer's first pod; it may go out to hubs, rewards and environments, so nothing is said of that."""
    return _policy(
        plan,
        name=names.trainer(plan.name),
        pods=plan.selector(role=ROLE_TRAINER),
        rules={
            "ingress": [
                {
                    "from": [{"podSelector": {"matchLabels": {names.LABEL_JOB: plan.name}}}],
                    "ports": [_tcp(names.PORT_GRPC), _tcp(names.PORT_WEIGHTS)],
                },
                {"ports": [_tcp(names.PORT_SIGNALS), _tcp(names.PORT_TRAINER_SIGNALS)]},
                *_from_ranks(plan),
            ]
        },
    )


def trainer_workers_policy(plan: Plan) -> Built:
    """Pods of the trainer's further nodes: nobody but the trainer's other pods reaches them, besides signals."""
    return _policy(
        plan,
        name=names.trainer_workers(plan.name),
        pods=plan.selector(role=ROLE_TRAINER_WORKER),
        rules={"ingress": [{"ports": [_tcp(names.PORT_TRAINER_SIGNALS)]}, *_from_ranks(plan)]},
    )


def _from_ranks(plan: Plan) -> list[Built]:
    """Ranks of other pods, on any port: collectives choose theirs as they start."""
    if plan.job.spec.trainer.nodes == 1:
        return []
    roles = {"key": names.LABEL_ROLE, "operator": "In", "values": [ROLE_TRAINER, ROLE_TRAINER_WORKER]}
    pods = {"matchLabels": {names.LABEL_JOB: plan.name}, "matchExpressions": [roles]}
    return [{"from": [{"podSelector": pods}]}]


def generators_policy(plan: Plan, *, pool: GeneratorPool) -> Built:
    """A pool's pods: out to scheduler and weights and to look names up, in for signals."""
    return _policy(
        plan,
        name=names.pool(plan.name, pool.name),
        pods=plan.selector(role=ROLE_GENERATOR, pool=pool.name),
        pool=pool.name,
        rules={
            "ingress": [{"ports": [_tcp(names.PORT_SIGNALS)]}],
            "egress": [
                {
                    "to": [{"podSelector": {"matchLabels": plan.selector(role=ROLE_TRAINER)}}],
                    "ports": [_tcp(names.PORT_GRPC), _tcp(names.PORT_WEIGHTS)],
                },
                {"ports": [{"port": _PORT_DNS, "protocol": "UDP"}, _tcp(_PORT_DNS)]},
            ],
        },
    )


def _policy(plan: Plan, *, name: str, pods: dict[str, str], rules: Built, pool: str | None = None) -> Built:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": plan.metadata(name, pool=pool),
        "spec": {"podSelector": {"matchLabels": pods}, "policyTypes": [key.capitalize() for key in rules], **rules},
    }


def _tcp(port: int) -> Built:
    return {"port": port, "protocol": "TCP"}
