"""`streamrl plan FILE`: what a job becomes on Kubernetes, without asking any cluster: objects, pods, volumes, memory, cost.
With `--optimize`: with as many generators and trainer processes as a profile says are best, and why.

The operator's own planning makes the objects. What it alone knows are placeholders here: its images (--trainer-image, --generator-image), UIDs, and ports
and addresses that a cluster gives. Without its RLCluster (--rlcluster) a member's namespace is called as at home, and generators dial `scheduler.example`.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from streamrl import __version__, names
from streamrl.clusters import RLCluster, RLClusterSpec
from streamrl.errors import EXIT_DONE, UserError, UserErrors
from streamrl.spec import RLJob, parse_job
from streamrl.spec.pod import RLJobDefaults
from streamrl.spec_warnings import spec_warnings
from streamrl_cli import console
from streamrl_cli.cluster.bundle import as_written, cluster_problems, collect, config_map, with_code
from streamrl_cli.cluster.output import FORMS, dump, section, text
from streamrl_cli.cluster.sizes import clusters, optimize
from streamrl_cli.cluster.sizes.stages import count_of
from streamrl_cli.jobfile import add_overrides, base_dir_of, check_file, hub_dir, load_document
from streamrl_cli.profiling.record import read_profile
from streamrl_cli.weight_stalls import HEAD, UNKNOWN, estimated_notes, estimated_rows
from streamrl_operator.planning.certificates import roles_of
from streamrl_operator.planning.defaults import Entry, Layer, inherit
from streamrl_operator.planning.estimate import ResourceEstimate, estimate, find_config
from streamrl_operator.planning.members import clusters_of, exposures, leaves_in
from streamrl_operator.planning.objects import plan_objects
from streamrl_operator.planning.objects.members import addresses, anchor, owned_by
from streamrl_operator.planning.objects.shared import JobPlan, MemberPlace, kept_claims
from streamrl_operator.planning.values import DesiredRun, ExposedAddresses, PlanningSettings
from streamrl_operator.planning.weight_times import MeasuredPool, weight_times

_NO_UID = "00000000-0000-0000-0000-000000000000"
_EXPOSED = ExposedAddresses(
    scheduler=f"scheduler.example:{names.PORT_GRPC}", weights=f"scheduler.example:{names.PORT_WEIGHTS}"
)
_WEIGHTS = "WEIGHTS, SECONDS FOR EACH VERSION"
_VOLUMES = ("CLAIM", "SIZE", "CLASS", "WHEN THE JOB IS DELETED")
Object = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("file", type=Path, metavar="FILE", help="job file; several documents are several jobs")
    add_overrides(parser)
    parser.add_argument("-o", "--output", choices=FORMS, help="all objects as they would be applied")
    parser.add_argument(
        "-n", "--namespace", default="default", metavar="NAME", help="namespace (default: the file's, else default)"
    )
    for role in ("trainer", "generator"):
        parser.add_argument(
            f"--{role}-image",
            default=f"localhost/streamrl/{role}:{__version__}",
            metavar="IMAGE",
            help="the operator's image of such pods (default: %(default)s)",
        )
    parser.add_argument(
        "--defaults",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="an RLJobDefaults that the job inherits; twice: first the cluster's, then the namespace's",
    )
    parser.add_argument(
        "--rlcluster",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="an RLCluster that pools of the job name; may be given again",
    )
    optimize.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan of each job in the file."""
    optimize.check(args)
    layers = [Layer(source=str(path), spec=load_document(path, model=RLJobDefaults).spec) for path in args.defaults]
    found = [load_document(path, model=RLCluster) for path in args.rlcluster]
    members = {one.metadata.name: one.spec for one in found}
    jobs, mistakes = check_file(args.file, check=cluster_problems, overrides=args.set)
    if mistakes:
        raise UserErrors(mistakes)
    reasons: list[str] = []
    if args.optimize:
        if len(jobs) != 1:
            raise UserError(field="--optimize", rule=f"needs a file with one job, {args.file} holds {len(jobs)}")
        optimise = clusters.optimise if args.pool_devices else optimize.optimise
        job, reasons = optimise(jobs[0], args, config=_config(jobs[0], args))
        jobs = [job]
    inherited = [inherit(job, layers) for job in jobs]
    console.warn(*(f"{args.file}: {warning}" for job, _ in inherited for warning in spec_warnings(job.spec)))
    plans = [(job, objects_of(job, args, members=members), origins) for job, origins in inherited]
    if args.output:
        console.out(*dump([obj for _, objects, _ in plans for obj in objects], form=args.output).split("\n"))
        if reasons:
            console.err(*reasons)  # the objects alone are the result
        return EXIT_DONE
    for number, (job, objects, origins) in enumerate(plans):
        known = estimate(job, config=_config(job, args))
        weights = weights_section(job, known=known, measured=_measured(args))
        console.out(
            *([""] if number else []), *summary(job, objects=objects, known=known, origins=origins, more=weights)
        )
    if reasons:
        console.out("", *reasons)
    return EXIT_DONE


def objects_of(job: RLJob, args: argparse.Namespace, *, members: Mapping[str, RLClusterSpec]) -> list[Object]:
    """All objects of a job that has just begun, at home and then in its members, but the Secrets with its certificates."""
    namespace = job.metadata.namespace or args.namespace
    bundle = collect(job, base_dir=base_dir_of(args.file))
    first: list[Object] = []
    if bundle.files:
        first = [config_map(job, bundle, namespace=namespace)]
        job = parse_job(with_code(as_written(job, namespace=namespace), job=job))
    sizes = {pool.name: pool.scaling.initial for pool in job.spec.pools}
    settings = PlanningSettings(
        namespace="streamrl-system", trainer_image=args.trainer_image, generator_image=args.generator_image
    )
    wanted = DesiredRun(trainers=1, generators=sizes, requested=sizes, images=settings.images)
    plan = JobPlan(
        job=job,
        namespace=namespace,
        uid=_NO_UID,
        wanted=wanted,
        settings=settings,
        exposures=exposures(job, members),
    )
    at_home = replace(plan, dials=_dials(plan, ""))
    replicas = {names.pool(job.metadata.name, pool): size for pool, size in sizes.items()}
    code = None if job.spec.task.code is None else {"data": {}, **(first[0] if first else {})}
    far = (obj for cluster in clusters_of(job) for obj in _in_member(plan, cluster, members.get(cluster), code=code))
    return [*first, *(_with_replicas(obj, replicas) for obj in plan_objects(at_home)), *far]


def _in_member(plan: JobPlan, cluster: str, known: RLClusterSpec | None, *, code: Object | None) -> Iterator[Object]:
    """`code`: the ConfigMap with the user's modules, empty where that is made by somebody else."""
    namespace = plan.namespace if known is None else known.namespace_of(plan.namespace)
    if namespace is None:
        rule = f"must be a cluster that jobs of namespace {plan.namespace} may use"
        raise UserError(field=f"RLCluster {cluster}", rule=rule, fix="map the namespace, or give --namespace")
    place = MemberPlace(cluster=cluster, namespace=namespace, origin=_NO_UID, code=code)
    there = replace(plan, place=place, dials=_dials(plan, cluster))
    yield anchor(there)
    kept = kept_claims(there)
    yield from (obj if obj["metadata"]["name"] in kept else owned_by(_NO_UID, obj) for obj in plan_objects(there))


def _dials(plan: JobPlan, cluster: str) -> ExposedAddresses | None:
    """Where generators of a cluster (empty: home) dial a scheduler in another one."""
    if (plan.job.spec.trainer.cluster_name or "") == cluster:
        return None
    exposure = plan.exposures.get(cluster)
    return (addresses(exposure, None) if exposure else None) or _EXPOSED


def _with_replicas(obj: Object, replicas: dict[str, int]) -> Object:
    """A GeneratorPool as it is once both field managers have written it."""
    if obj["kind"] != "GeneratorPool":
        return obj
    return obj | {"spec": obj["spec"] | {"replicas": replicas[obj["metadata"]["name"]]}}


def summary(
    job: RLJob,
    *,
    objects: list[Object],
    known: ResourceEstimate,
    origins: Sequence[Entry] = (),
    more: Iterable[str] = (),
) -> Iterator[str]:
    """The plan for people. `more`: lines before the estimate."""
    name, clusters = job.metadata.name, clusters_of(job)
    secrets = [names.ca_secret(name), *(names.tls_secret(name, role) for role in roles_of(job))]
    home, pods = _of_cluster(objects, None), ("SET", "PODS", "CONTAINER", "IMAGE", "REQUESTS", "LIMITS")
    yield f"{name}: {len(home)} objects and {len(secrets)} Secrets"
    yield from section("PODS", pods, _containers(home))
    yield from section("VOLUMES", _VOLUMES, _claims(job, home))
    yield from section("INHERITED", ("FIELD", "VALUE", "FROM", ""), [_origin(one) for one in origins])
    yield from section("OTHER OBJECTS", ("KIND", "NAMES"), _others(home, secrets=secrets))
    for cluster in clusters:
        there = _of_cluster(objects, cluster)
        leaves = [names.tls_secret(name, called) for called in leaves_in(job, cluster).values()]
        yield from (
            "",
            f"IN CLUSTER {cluster}: {len(there)} objects and {count_of(len(leaves), 'Secret')}, owned by ConfigMap {names.anchor(name)}",
        )
        yield from section("PODS", pods, _containers(there))
        yield from section("VOLUMES", _VOLUMES, _claims(job, there))
        yield from section("OTHER OBJECTS", ("KIND", "NAMES"), _others(there, secrets=leaves))
    yield from more
    yield ""
    yield "ESTIMATE"
    yield from (f"  {line}" for line in known.lines())


def weights_section(job: RLJob, *, known: ResourceEstimate, measured: Mapping[str, MeasuredPool]) -> Iterator[str]:
    """Lines about the seconds of a version; none if there is no model, or no generators pull it."""
    if known.simulated or not job.spec.generators:
        return
    times = weight_times(job, known=known, measured=measured)
    rows = () if times is None else estimated_rows(times)
    yield from section(_WEIGHTS, HEAD, rows) if rows else ("", _WEIGHTS)
    yield from (f"  {line}" for line in (UNKNOWN if times is None else estimated_notes(times)))


def _measured(args: argparse.Namespace) -> dict[str, MeasuredPool]:
    """What the profile of `--optimize` has of each pool."""
    pools = read_profile(args.profile).pools if args.profile is not None else ()
    return {pool.name: MeasuredPool(curve=pool.curve, fill_s=pool.fill_milliseconds / 1e3) for pool in pools}


def _of_cluster(objects: list[Object], cluster: str | None) -> list[Object]:
    """None: at home."""
    return [obj for obj in objects if obj["metadata"].get("labels", {}).get(names.LABEL_CLUSTER) == cluster]


def _origin(entry: Entry) -> tuple[str, ...]:
    value = "(left out)" if entry.value is None else json.dumps(entry.value, ensure_ascii=False)
    return entry.field, value, entry.source, "enforced" if entry.is_enforced else ""


def _containers(objects: list[Object]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for obj in objects:
        if obj["kind"] != "StatefulSet":
            continue
        pod, first = obj["spec"]["template"]["spec"], (obj["metadata"]["name"], str(obj["spec"]["replicas"]))
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            resources = container.get("resources", {})
            amounts = (_amounts(resources.get("requests")), _amounts(resources.get("limits")))
            rows.append((*first, container["name"], container["image"], *amounts))
            first = ("", "")
    return rows


def _amounts(amounts: dict[str, str] | None) -> str:
    return text(", ".join(f"{name} {amount}" for name, amount in (amounts or {}).items()))


def _claims(job: RLJob, objects: list[Object]) -> list[tuple[str, ...]]:
    rows = []
    for obj in objects:
        if obj["kind"] == "PersistentVolumeClaim":
            spec = obj["spec"]
            fate = "deleted" if obj["metadata"].get("ownerReferences") else "stays"
            size, of_class = spec["resources"]["requests"]["storage"], spec.get("storageClassName", "(the cluster's)")
            rows.append((obj["metadata"]["name"], size, of_class, fate))
    own = job.spec.storage.checkpoints.given_claim
    return [*rows, *([(own, "(yours)", "", "stays")] if own and rows else [])]  # beside the journal's


def _others(objects: list[Object], *, secrets: list[str]) -> list[tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for obj in objects:
        if obj["kind"] not in ("StatefulSet", "PersistentVolumeClaim"):
            found.setdefault(obj["kind"], []).append(obj["metadata"]["name"])
    found["Secret"] = secrets
    return [(kind, ", ".join(those)) for kind, those in found.items()]


def _config(job: RLJob, args: argparse.Namespace) -> Mapping[str, Any] | None:
    """The model's config.json, if it is at hand."""
    return find_config(job.spec.model, base_dir=base_dir_of(args.file), hub_dir=hub_dir())
