"""`job.json`, which every worker reads: what it says, and when it may say something else.

All processes of a job go on from one and the same file, and read it at any start of theirs. So it is written anew only while no pod is there
and none is asked for; a change of the spec that it has to say waits until then (`life.py`). What may change in a running job is not in it.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from streamrl import keys
from streamrl.changes import ALWAYS, without
from streamrl.errors import UserErrors
from streamrl.spec import RLJob, RLJobSpec, parse_job
from streamrl_operator.planning import members, pods
from streamrl_operator.planning.values import Observed

Document = dict[str, Any]

_UNREAD = without(RLJobSpec, (*ALWAYS, "trainer.pod", "serviceAccount", "gang"))
"""No worker reads these, so their spellings may change with the operator."""
_MOST_JOBS = 2048


def job_json(job: RLJob, *, namespace: str, there: str) -> str:
    """What is there stays byte for byte while it says the same.

    Another release of the operator knows other fields, and the images of a job that has begun refuse those that they do not know.
    """
    document = _document(job, namespace=namespace)
    return there if _read(there) == document else canonical(document) + "\n"


def read_job(document: Document) -> RLJob:
    """The job of a document, which may be of before `weights.http`: the CRD of now has dropped its `weights.grpc`, a `job.json` still has it.

    Raises:
        UserErrors: it is not valid.
    """
    spec = document.get("spec")
    weights = spec.get("weights") if isinstance(spec, Mapping) else None
    if isinstance(spec, Mapping) and isinstance(weights, Mapping) and not weights.keys() - {"grpc"}:
        given = weights.get("grpc") or {}
        http = {"timeoutSeconds": given["timeoutSeconds"]} if "timeoutSeconds" in given else {}
        document = document | {"spec": {**spec, "weights": {"http": http}}}
    return parse_job(document)


def is_held(observed: Observed) -> bool:
    """Whether the file should say something else, and pods are there or asked for (or may be, in a member) that go on from what it says."""
    asked = any(pods.asked(one) for one in observed.sets.values())
    if observed.job is None or not (observed.pods or asked or members.unknown_pods(observed)):
        return False
    there = _read(observed.resolved.get(keys.FILE_JOB, ""))  # what nobody can read holds nothing up
    return there is not None and there != _document(observed.job, namespace=observed.key[0])


def canonical(value: object) -> str:
    """`value` as JSON, always the same for the same value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _document(job: RLJob, *, namespace: str | None) -> Document:
    """The validated job with all defaults; of its metadata only what says which job it is."""
    document = job.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"spec": _UNREAD})
    return document | {"metadata": {"name": job.metadata.name, "namespace": namespace}}


@lru_cache(maxsize=_MOST_JOBS)
def _read(text: str) -> Document | None:
    """What a `job.json` says; None: nothing. Not to be changed by the caller."""
    try:
        job = read_job(json.loads(text))
    except (ValueError, RecursionError, UserErrors):
        return None
    return _document(job, namespace=job.metadata.namespace)
