"""`streamrl scale JOB POOL N`: set the size of a pool.

Of a `static` pool it changes the job; of an `external` pool it writes /scale of the GeneratorPool, as `kubectl scale` does. An `auto` pool has its size by queue and pace.
"""

import argparse
from typing import Any

from streamrl import names
from streamrl.errors import EXIT_DONE, UserError
from streamrl.spec.parse import suggest
from streamrl_cli import console
from streamrl_cli.cluster.api import ApiClient, Object, ObjectNotFoundError, add_connection, connect
from streamrl_cli.cluster.jobs import DELETING, ENDED, state
from streamrl_operator.kube.kinds import GENERATOR_POOL, RLJOB

MOST = 1024
"""As `replicas` of the contract."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("job", metavar="JOB", help="name of the job")
    parser.add_argument("pool", metavar="POOL", help="name of the pool in the job")
    parser.add_argument("replicas", metavar="N", type=int, help="pods")
    add_connection(parser)


async def run(args: argparse.Namespace) -> int:
    """Scale the pool."""
    if not 1 <= args.replicas <= MOST:
        fix = "`streamrl suspend` takes all pods away" if args.replicas == 0 else ""
        raise UserError(field="N", rule=f"must be 1 to {MOST}", got=args.replicas, fix=fix)
    async with connect(args) as cluster:
        job = await cluster.get(RLJOB, args.job)
        if state(job) in (*ENDED, DELETING):
            raise UserError(field=f"rljob/{args.job}", rule=f"cannot be scaled: it is {state(job)}")
        index, pool = _find(job, args.pool)
        scaling = pool.get("scaling", {})
        if "external" in scaling:
            before = await _scale_external(args, cluster=cluster)
        elif index is None:
            raise _is_agents()
        elif "auto" in scaling:
            raise _is_auto(index, args.replicas)
        else:
            before = await _scale_static(args, index=index, scaling=scaling, cluster=cluster)
    console.out(f"pool {args.pool} of rljob/{args.job}: {before} -> {args.replicas} replicas")
    return EXIT_DONE


def _find(job: Object, name: str) -> tuple[int | None, Object]:
    """Number of the pool among those of generators, None of agents; and what the job says of it."""
    pools = job["spec"]["generators"]
    agents = (job["spec"]["task"].get("agent") or {}).get("pool")
    if agents is not None and name == names.AGENTS:
        return None, agents
    for index, pool in enumerate(pools):
        if pool["name"] == name:
            return index, pool
    fix = suggest(name, [pool["name"] for pool in pools])
    raise UserError(field="POOL", rule="is not a pool of the job", got=name, fix=fix)


def _is_agents() -> UserError:
    rule = "cannot be changed in a job; only a pool with scaling external is scaled by hand"
    return UserError(field="spec.task.agent.pool.scaling", rule=rule, fix="make a new job")


def _is_auto(index: int, replicas: int) -> UserError:
    field = f"spec.generators[{index}].scaling.auto"
    fix = (
        f"change minReplicas or maxReplicas of the job, or give the pool {{external: {{initialReplicas: {replicas}}}}}"
    )
    return UserError(field=field, rule="sets the size by queue and pace; by hand it would not last", fix=fix)


async def _scale_external(args: argparse.Namespace, *, cluster: ApiClient) -> Any:  # noqa: ANN401 - a number as it is stored
    name = names.pool(args.job, args.pool)
    try:
        pool = await cluster.get(GENERATOR_POOL, name)
    except ObjectNotFoundError:
        fix = f"see `streamrl status {args.job}`"
        raise UserError(field=f"generatorpool/{name}", rule="was not made by the operator yet", fix=fix) from None
    await cluster.scale(GENERATOR_POOL, name, replicas=args.replicas)
    return pool["spec"]["replicas"]


async def _scale_static(args: argparse.Namespace, *, index: int, scaling: Object, cluster: ApiClient) -> Any:  # noqa: ANN401
    path = f"/spec/generators/{index}"
    changes = [
        {"op": "test", "path": f"{path}/name", "value": args.pool},  # the list may have changed since
        {"op": "add", "path": f"{path}/scaling", "value": {"static": {"replicas": args.replicas}}},
    ]
    await cluster.patch(RLJOB, args.job, changes)
    return scaling.get("static", {}).get("replicas", 1)
