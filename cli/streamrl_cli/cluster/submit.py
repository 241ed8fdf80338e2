"""`streamrl submit FILE`: validate jobs, put their code into ConfigMaps, and give them to a cluster.

What the job's functions need and lies beside the file (modules, a data file) goes into the ConfigMap `<job>-code`, unless
`spec.task.code` names one. ConfigMaps of the file itself are applied before its jobs. Submitting again changes what may change: see docs/cluster-jobs.md. Code may not, as `spec.task`
may not: pods that start again later would go on with it. Nothing is written before the API server has said that it takes the job.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streamrl import names
from streamrl.errors import EXIT_DONE, UserError, UserErrors
from streamrl.spec import RLJob
from streamrl.spec_warnings import spec_warnings
from streamrl_cli import console
from streamrl_cli.cluster.api import ApiClient, ObjectNotFoundError, add_connection, connect
from streamrl_cli.cluster.bundle import (
    MIB,
    Bundle,
    as_written,
    cluster_problems,
    collect,
    config_map,
    owned,
    with_code,
)
from streamrl_cli.cluster.jobs import follow
from streamrl_cli.jobfile import add_overrides, base_dir_of, check_file, read_config_maps
from streamrl_operator.kube.kinds import CONFIG_MAP, RLJOB

_KIB = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="job file; several documents are several jobs, and ConfigMaps that they name",
    )
    add_overrides(parser)
    parser.add_argument(
        "--follow",
        action="store_true",
        help="show progress until the end: 0 Succeeded, 1 Failed; Ctrl-C leaves the job alone",
    )
    parser.add_argument("--dry-run", action="store_true", help="let the API server check it, and change nothing")
    parser.add_argument(
        "--force", action="store_true", help="take fields that somebody else has set since, and change code"
    )
    add_connection(parser)


async def run(args: argparse.Namespace) -> int:
    """Submit the jobs of the file."""
    jobs, mistakes = check_file(args.file, check=cluster_problems, overrides=args.set, beside=(CONFIG_MAP.kind,))
    if mistakes:
        raise UserErrors(mistakes)
    maps = read_config_maps(args.file)
    if not jobs:
        raise UserError(field=str(args.file), rule="holds no job", fix="give its ConfigMaps to kubectl apply")
    if args.follow and len(jobs) > 1:
        raise UserError(field="--follow", rule=f"takes one job, {args.file} has {len(jobs)}")
    for own in [job.metadata.namespace for job in jobs] + [one["metadata"].get("namespace") for one in maps]:
        _check_namespace(own, args)
    console.warn(*(f"{args.file}: {warning}" for job in jobs for warning in spec_warnings(job.spec)))
    async with connect(args) as cluster:
        home = cluster.namespace
        for job in jobs if len(jobs) + len(maps) > 1 else ():  # all of them, or none
            cluster.namespace = job.metadata.namespace or home
            document, _ = _read(job, args, cluster=cluster)
            await cluster.apply(RLJOB, document, force=args.force, dry_run=True)
            await _check_code(job, maps, args, cluster=cluster)
        for is_dry in (True,) if args.dry_run else (True, False):
            for one in maps:
                cluster.namespace = one["metadata"].get("namespace") or home
                await cluster.apply(CONFIG_MAP, one, force=args.force, dry_run=is_dry)
        for one in maps:
            console.out(f"configmap/{one['metadata']['name']} of {args.file}{_mark(args)}")
        for job in jobs:
            cluster.namespace = job.metadata.namespace or home
            await _apply(job, args, cluster=cluster)
        if not args.follow or args.dry_run:
            return EXIT_DONE
        return await follow(jobs[0].metadata.name, cluster=cluster)


def _mark(args: argparse.Namespace) -> str:
    return " (dry run: nothing was done)" if args.dry_run else ""


def _check_namespace(own: str | None, args: argparse.Namespace) -> None:
    if own is not None and args.namespace is not None and own != args.namespace:
        rule = f"must be that of --namespace ({args.namespace})"
        raise UserError(field="metadata.namespace", rule=rule, got=own, fix="leave one of the two out")


def _read(job: RLJob, args: argparse.Namespace, *, cluster: ApiClient) -> tuple[dict[str, Any], Bundle]:
    """Return the job as it is applied, and the code that goes with it."""
    document, bundle = as_written(job, namespace=cluster.namespace), collect(job, base_dir=base_dir_of(args.file))
    if bundle.files:
        with_code(document, job=job)
    return document, bundle


async def _check_code(
    job: RLJob, maps: Sequence[dict[str, Any]], args: argparse.Namespace, *, cluster: ApiClient
) -> None:
    """Refuse a ConfigMap of the file that would change the code of a job that is there."""
    named = None if job.spec.task.code is None else job.spec.task.code.config_map_name
    is_copied = job.spec.trainer.cluster_name is not None
    for code in (one for one in maps if one["metadata"]["name"] == named):
        if (is_copied or not args.force) and await _generation(job.metadata.name, cluster=cluster) is not None:
            await _refuse_other_code(code, is_copied=is_copied, cluster=cluster)


async def _apply(job: RLJob, args: argparse.Namespace, *, cluster: ApiClient) -> None:
    before = await _generation(job.metadata.name, cluster=cluster)
    document, bundle = _read(job, args, cluster=cluster)
    how = {"force": args.force, "dry_run": args.dry_run}
    if not bundle.files:
        stored = await cluster.apply(RLJOB, document, **how)
        await _look_for_code(job, cluster=cluster)
    else:
        code = config_map(job, bundle, namespace=cluster.namespace)
        await cluster.apply(RLJOB, document, force=args.force, dry_run=True)
        is_copied = job.spec.trainer.cluster_name is not None  # when it begins, and never again
        if before is not None and (is_copied or not args.force):
            await _refuse_other_code(code, is_copied=is_copied, cluster=cluster)
        await cluster.apply(CONFIG_MAP, code, **how)  # before the job, whose pods wait for it
        console.out(f"configmap/{names.code(job.metadata.name)}: {', '.join(bundle.files)} ({_size(bundle.bytes)})")
        stored = await cluster.apply(RLJOB, document, **how)
        if not args.dry_run:
            await cluster.apply(CONFIG_MAP, owned(code, stored), **how)
    done = "created" if before is None else ("unchanged" if before == stored["metadata"]["generation"] else "changed")
    name = job.metadata.name
    console.out(f"rljob/{name} {done} in namespace {cluster.namespace} of context {cluster.context}{_mark(args)}")
    if not args.dry_run and not args.follow:
        console.out(f"look: streamrl status {name} -n {cluster.namespace}")


async def _generation(name: str, *, cluster: ApiClient) -> int | None:
    """Of the job as it is stored; None: it is not there."""
    try:
        return int((await cluster.get(RLJOB, name))["metadata"]["generation"])
    except ObjectNotFoundError:
        return None


async def _refuse_other_code(code: dict[str, Any], *, is_copied: bool, cluster: ApiClient) -> None:
    """The job is there: its code stays what it began with.

    Raises `UserError`: a file differs from the one that is stored.
    """
    try:
        found = await cluster.get(CONFIG_MAP, code["metadata"]["name"])
    except ObjectNotFoundError:
        return
    ours, theirs = ({**one.get("data", {}), **one.get("binaryData", {})} for one in (code, found))
    changed = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if changed:
        raise UserError(
            field=f"configmap/{code['metadata']['name']}",
            rule=f"{', '.join(changed)} cannot be changed: pods that start again would go on with other code than the job began with",
            fix="make a new job" if is_copied else "make a new job, or change it all the same with --force",
        )


async def _look_for_code(job: RLJob, *, cluster: ApiClient) -> None:
    """Say so if the ConfigMap that the job names is not there: its trainer's pod would wait for it without a word."""
    code = job.spec.task.code
    if code is None:
        return
    try:
        await cluster.get(CONFIG_MAP, code.config_map_name)
    except ObjectNotFoundError:
        make = f"kubectl create configmap {code.config_map_name} -n {cluster.namespace} --from-file=FILE"
        console.err(f"configmap/{code.config_map_name} is not there yet, and the job's pods wait for it; {make}")
    except UserError:  # one who may not look is told nothing
        return


def _size(size: int) -> str:
    return f"{size / MIB:.1f} MiB" if size >= MIB else f"{max(1, round(size / _KIB))} KiB"
