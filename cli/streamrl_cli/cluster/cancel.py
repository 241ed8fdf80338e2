"""`streamrl cancel JOB`: delete the job with all that it has. Its checkpoints stay or go as the job says, unless told otherwise.

Asks first, unless --yes.
"""

import argparse
import contextlib
import sys

from streamrl import names
from streamrl.errors import EXIT_DONE, EXIT_FAULT, UserError
from streamrl_cli import console
from streamrl_cli.cluster.api import ApiClient, Object, ObjectNotFoundError, add_connection, connect
from streamrl_cli.cluster.jobs import state, steps
from streamrl_operator.kube.kinds import CLAIM, RLJOB
from streamrl_operator.planning.values import trainer_cluster


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("job", metavar="JOB", help="name of the job")
    parser.add_argument(
        "--keep-checkpoints",
        action=argparse.BooleanOptionalAction,
        help="keep the volume of the checkpoints, or delete it (default: as storage.checkpoints.whenDeleted says)",
    )
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    add_connection(parser)


async def run(args: argparse.Namespace) -> int:
    """Delete the job."""
    async with connect(args) as cluster:
        job = await cluster.get(RLJOB, args.job)
        claim, keep = _checkpoints(job, keep=args.keep_checkpoints)
        at = trainer_cluster(job)
        where = f"claim {claim} in cluster {at}" if at else f"claim {claim}"
        fate = f"the checkpoints ({where}) {'stay' if keep else 'are deleted too'}"
        question = f"delete rljob/{args.job} in namespace {cluster.namespace} of context {cluster.context} ({state(job)}, step {steps(job)})? {fate}"
        if not args.yes and not _agrees(question):
            console.out("nothing was changed")
            return EXIT_FAULT
        await _delete(job, claim, keep=keep, cluster=cluster)
    console.out(f"rljob/{args.job} is being deleted; {fate}")
    return EXIT_DONE


def _agrees(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UserError(field="--yes", rule="is required where nobody can be asked", fix="add --yes to delete the job")
    return console.ask(f"{question} [y/N]").strip().lower() in ("y", "yes")


def _checkpoints(job: Object, *, keep: bool | None) -> tuple[str, bool]:
    """The claim of the checkpoints, and whether it is to stay."""
    checkpoints = job["spec"].get("storage", {}).get("checkpoints", {})
    own = checkpoints.get("claimName")
    at = trainer_cluster(job)
    if keep is False and at:
        fix = f"leave it out, and delete the claim there: kubectl delete pvc {own or names.checkpoints_claim(job['metadata']['name'])}"
        raise UserError(field="--no-keep-checkpoints", rule=f"reaches no claims in member cluster {at}", fix=fix)
    if own is None:
        as_told = checkpoints.get("whenDeleted", "Retain") == "Retain" if keep is None else keep
        return names.checkpoints_claim(job["metadata"]["name"]), as_told
    if keep is False:
        fix = f"leave it out, and delete the claim yourself: kubectl delete pvc {own}"
        raise UserError(field="--no-keep-checkpoints", rule=f"is for claims that the job made; {own} is yours", fix=fix)
    return own, True


async def _delete(job: Object, claim: str, *, keep: bool, cluster: ApiClient) -> None:
    """Delete the job; its claim outlives it, or ends with it.

    A claim is kept by an annotation that the operator honours, also when it sees the deletion first; and by taking its owner away, for
    where no operator runs. A claim in a member is the operator's alone: one of its name at home is of another job.
    """
    name, uid, is_here = job["metadata"]["name"], job["metadata"]["uid"], not trainer_cluster(job)
    if keep and claim == names.checkpoints_claim(name):
        await cluster.merge(RLJOB, name, {"metadata": {"annotations": {names.ANNOTATION_KEEP_CHECKPOINTS: "true"}}})
        if is_here:
            await _disown(claim, uid=uid, cluster=cluster)
    await cluster.delete(job, RLJOB)
    if not is_here:
        return
    try:
        found = await cluster.get(CLAIM, claim)
        if not keep:
            await cluster.delete(found, CLAIM)
    except ObjectNotFoundError:
        return
    if keep and found["metadata"].get("deletionTimestamp"):
        rule = (
            "could not be kept: it is being deleted already; its volume goes when the last pod that uses it has ended"
        )
        raise UserError(field=f"claim {claim}", rule=rule, fix="copy what you need now")


async def _disown(name: str, *, uid: str, cluster: ApiClient) -> None:
    """Take the claim's owner away, if there is a claim and the job is its owner."""
    with contextlib.suppress(ObjectNotFoundError):
        claim = await cluster.get(CLAIM, name)
        if any(owner["uid"] == uid for owner in claim["metadata"].get("ownerReferences") or ()):
            await cluster.merge(CLAIM, name, {"metadata": {"ownerReferences": None}})
