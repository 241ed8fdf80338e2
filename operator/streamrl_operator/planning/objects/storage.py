"""What pods are given: the resolved job, an account without access, volumes."""

import json

from streamrl import keys, names
from streamrl.errors import UserErrors
from streamrl.spec import RLJob, RLJobSpec, parse_job
from streamrl.spec.training import Claim
from streamrl_operator.planning.objects.meta import Built, Plan, canonical


def service_account(plan: Plan) -> Built:
    """The account of all pods; nothing is bound to it and no token is mounted."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": plan.metadata(names.service_account(plan.name)),
        "automountServiceAccountToken": False,
    }


def resolved_job(plan: Plan) -> Built:
    """The ConfigMap that every worker reads the job from, and that keeps what its pods were begun with."""
    images = plan.wanted.images
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": plan.metadata(names.resolved(plan.name)),
        "data": {
            keys.FILE_JOB: _job_json(plan),
            **({} if images is None else {keys.FILE_IMAGES: canonical(images.model_dump(by_alias=True)) + "\n"}),
        },
    }


def _job_json(plan: Plan) -> str:
    """What is there stays byte for byte while it says the same.

    Another release of the operator knows other fields, and the images of a job that has begun refuse those that they do not know.
    """
    there, document = plan.resolved.get(keys.FILE_JOB, ""), _document(plan.job, namespace=plan.namespace)
    return there if _read(there) == document else canonical(document) + "\n"


def _document(job: RLJob, *, namespace: str | None) -> Built:
    """The validated job with all defaults, without what may change; of its metadata only what says which job it is."""
    document = job.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"spec": RLJobSpec.may_change})
    return document | {"metadata": {"name": job.metadata.name, "namespace": namespace}}


def _read(text: str) -> Built | None:
    """What a `job.json` says; None: nothing."""
    try:
        job = parse_job(json.loads(text))
    except (ValueError, RecursionError, UserErrors):
        return None
    return _document(job, namespace=job.metadata.namespace)


def claims(plan: Plan) -> list[Built]:
    """The claims that the job does not bring along."""
    storage = plan.job.spec.storage
    made = [_claim(plan, name=names.journal_claim(plan.name), claim=storage.journal)]
    if storage.checkpoints.claim_name is None:
        kept = plan.wanted.keeps_checkpoints
        shared = plan.job.spec.trainer.nodes > 1
        name = names.checkpoints_claim(plan.name)
        made.append(_claim(plan, name=name, claim=storage.checkpoints, kept=kept, shared=shared))
    return made


def _claim(plan: Plan, *, name: str, claim: Claim, kept: bool = False, shared: bool = False) -> Built:
    """`shared`: pods on several nodes write to it."""
    mode = "ReadWriteMany" if shared else "ReadWriteOnce"
    spec: Built = {"accessModes": [mode], "resources": {"requests": {"storage": claim.size}}}
    if claim.storage_class_name is not None:
        spec["storageClassName"] = claim.storage_class_name
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": plan.metadata(name, owned=claim.when_deleted == "Delete" and not kept),
        "spec": spec,
    }
