"""Pods of agents: the container that runs the user's programs, and the link beside it, which alone has the job's certificate.

link (main) ── a socket on a volume of both ── agents (sidecar: starts before the link and ends after it, so that what is played can end)
  │ leaf of role `agents`, job file                │ the user's image, `task.code`, the job's environment and mounts
  └── run volume: the chat template's files ───────┘ (to read)
"""

from streamrl import names
from streamrl.spec.task import AgentEgress, AgentPool
from streamrl_operator.planning.objects import containers, shared, template
from streamrl_operator.planning.objects.containers import Container
from streamrl_operator.planning.objects.shared import Built, JobPlan
from streamrl_operator.planning.pods import ROLE_TRAINER

_GRACE_S = 120
"""For what is played to be answered; the rest is played again elsewhere."""
_VOLUME_TASKS, _VOLUME_CODE, _VOLUME_LINK_TMP = "streamrl-tasks", "streamrl-code", "streamrl-link-tmp"


def pod_template(plan: JobPlan, *, pool: AgentPool) -> template.Template:
    """Of the pool's pods."""
    code = plan.job.spec.task.code
    return template.Template(
        role=names.AGENTS,
        pool=pool.name,
        annotations={
            template.DEFAULT_CONTAINER: names.CONTAINER_AGENTS,
            **template.skipped_by_webhooks(names.CONTAINER_AGENTS, given=pool.pod.annotations),
        },
        grace_s=_GRACE_S,
        init_containers=[_agents(plan)],
        main=_link(plan),
        volumes={
            template.VOLUME_JOB: template.config_map(names.resolved(plan.name)),
            template.VOLUME_TLS: template.secret(names.tls_secret(plan.name, names.AGENTS)),
            template.VOLUME_RUN: template.scratch(),
            template.VOLUME_TMP: template.scratch(),
            _VOLUME_TASKS: template.scratch(),
            _VOLUME_LINK_TMP: template.scratch(),
            **({} if code is None else {_VOLUME_CODE: template.config_map(code.config_map_name)}),
        },
        image=plan.job.spec.trainer.pod.tasks_image or _our_image(plan),
        pod=pool.pod,
    )


def _agents(plan: JobPlan) -> Container:
    """Without certificate, job file and token; what it is to do comes over the socket."""
    return Container(
        name=names.CONTAINER_AGENTS,
        module="streamrl_workers.tasks.host",
        variables=containers.agents_variables(),
        mounts={
            names.DIR_TASKS: _VOLUME_TASKS,
            names.DIR_RUN: template.VOLUME_RUN,
            template.DIR_TMP: template.VOLUME_TMP,
            **({} if plan.job.spec.task.code is None else {names.DIR_CODE: _VOLUME_CODE}),
        },
        read_only=(template.VOLUME_RUN, _VOLUME_CODE),
        sidecar=True,
    )


def _link(plan: JobPlan) -> Container:
    return Container(
        name=names.CONTAINER_AGENT_LINK,
        module="streamrl_workers.agent_link",
        variables=containers.agent_link_variables(plan.job),
        mounts={
            names.DIR_JOB: template.VOLUME_JOB,
            names.DIR_TLS: template.VOLUME_TLS,
            names.DIR_RUN: template.VOLUME_RUN,
            names.DIR_TASKS: _VOLUME_TASKS,
            template.DIR_TMP: _VOLUME_LINK_TMP,
        },
        read_only=(template.VOLUME_JOB, template.VOLUME_TLS),
        ports={names.PORT_NAME_SIGNALS: names.PORT_SIGNALS},
        signals_port=names.PORT_SIGNALS,
        resources=template.SMALL,
        image=_our_image(plan),
        is_ours_alone=True,
    )


def _our_image(plan: JobPlan) -> str:
    """That of the scheduler."""
    return plan.job.spec.trainer.pod.image or plan.images.trainer


def policies(plan: JobPlan) -> list[Built]:
    """Of the pool's pods, where the administrator wants policies."""
    pool = plan.job.spec.agent_pool
    return [] if pool is None or not plan.settings.isolates_jobs else [_policy(plan, pool=pool)]


def _policy(plan: JobPlan, *, pool: AgentPool) -> Built:
    """Out to the scheduler, to look names up, and to what the job allows; in for signals."""
    trainer: Built = {"to": [{"podSelector": {"matchLabels": plan.selector(role=ROLE_TRAINER)}}]}
    egress: list[Built] = [
        {**({} if plan.job.spec.trainer.pod.host_network else trainer), "ports": [shared.tcp(names.PORT_GRPC)]},
        shared.dns(),
        *map(_allowed, pool.egress),
    ]
    ingress: list[Built] = [{"ports": [shared.tcp(names.PORT_SIGNALS)]}]
    name = names.pool(plan.name, pool.name)
    return shared.policy(plan, name, role=names.AGENTS, pool=pool.name, ingress=ingress, egress=egress)


def _allowed(to: AgentEgress) -> Built:
    block = {"cidr": to.cidr, **({"except": list(to.except_)} if to.except_ else {})}
    return {"to": [{"ipBlock": block}], **({"ports": [shared.tcp(port) for port in to.ports]} if to.ports else {})}
