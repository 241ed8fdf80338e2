"""The user's modules and data files beside a job file, as the ConfigMap that the job's pods get.

Owns what goes in (the modules of the job's functions, the modules beside the file that those import, the data file), how the
job then names it, and what a valid job would stumble over on a cluster. A ConfigMap is flat and of at most 1 MiB; what does
not fit in is refused with what to do instead. Writes nothing.
"""

import base64
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl import names
from streamrl.errors import UserError
from streamrl.spec import RLJob
from streamrl.spec.base import is_url
from streamrl_cli.local import check_data_file, job_problems, model_directories
from streamrl_cli.user_function import check_function, functions_of
from streamrl_workers.plugins.kinds import plugins_of
from streamrl_workers.plugins.sources import local_modules

MAX_BYTES = 1024 * 1024
"""Of one ConfigMap; the API server refuses more."""
MIB = 1024 * 1024
MANAGED_BY = "streamrl-cli"
_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}\Z")
_ON_A_VOLUME = "put it on a volume (spec.trainer.pod.volumes) or into an own image, and name its absolute path"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Files for a job's ConfigMap."""

    files: Mapping[str, bytes]
    """By key, which is the file's name."""

    @property
    def bytes(self) -> int:
        """Of all files and their names."""
        return sum(len(key) + len(data) for key, data in self.files.items())


def bundle_problems(job: RLJob, *, base_dir: Path) -> list[UserError]:
    """What keeps the job's functions and files from reaching its pods."""
    if job.spec.task.code is not None:
        return []  # whoever names a ConfigMap has made it
    problems = [*_function_problems(job, base_dir), *_data_problems(job, base_dir)]
    problems += [*_model_problems(job), *_reference_problems(job), *_ranker_problems(job)]
    if not problems and (size := collect(job, base_dir=base_dir).bytes) > MAX_BYTES:
        rule = f"and the data files beside the job file must be at most 1 MiB for a ConfigMap, are {size / MIB:.1f} MiB"
        problems.append(UserError(field="spec.task: modules", rule=rule, fix=_ON_A_VOLUME))
    return problems


def collect(job: RLJob, *, base_dir: Path) -> Bundle:
    """The files beside the job file that the job needs; it has no `bundle_problems` but perhaps the size."""
    files: dict[str, bytes] = {}
    if job.spec.task.code is not None:
        return Bundle(files=files)
    for path in _local_modules(job, base_dir).values():
        if path.is_file():
            files[path.name] = path.read_bytes()
    for path in (base_dir / given for _, given in _data_paths(job)):
        files[path.name] = path.read_bytes()
    return Bundle(files=files)


def config_map(job: RLJob, bundle: Bundle, *, namespace: str) -> dict[str, Any]:
    """The ConfigMap of a bundle: texts as texts, so that people can read them."""
    texts: dict[str, str] = {}
    others: dict[str, str] = {}
    for key, data in sorted(bundle.files.items()):
        try:
            texts[key] = data.decode("utf-8")
        except UnicodeDecodeError:
            others[key] = base64.b64encode(data).decode()
    body = {"data": texts} | ({"binaryData": others} if others else {})
    name = job.metadata.name
    labels = {names.LABEL_INSTANCE: name, names.LABEL_MANAGED_BY: MANAGED_BY}  # not the operator's: it lets it alone
    metadata = {"name": names.code(name), "namespace": namespace, "labels": labels}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, **body}


def owned(code: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """The ConfigMap as one that goes with the stored `job`."""
    meta = job["metadata"]
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": meta["name"], "uid": meta["uid"]}
    return code | {"metadata": code["metadata"] | {"ownerReferences": [owner]}}


def as_written(job: RLJob, *, namespace: str) -> dict[str, Any]:
    """The job as its author wrote it: without the defaults, which are the API server's."""
    document = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    document["metadata"]["namespace"] = namespace
    return document


def with_code(document: dict[str, Any], *, job: RLJob) -> dict[str, Any]:
    """`document` (the job as plain data, changed in place) naming the ConfigMap and the files in it."""
    task = document["spec"]["task"]
    task["code"] = {"configMapName": names.code(job.metadata.name)}
    for one in task.get("mixture") or [task]:
        for source in one["dataset"].values():
            if "path" in source and not _is_elsewhere(source["path"]):
                source["path"] = Path(source["path"]).name
    return document


def _function_problems(job: RLJob, base_dir: Path) -> Iterator[UserError]:
    modules = _local_modules(job, base_dir)
    for function in functions_of(job):
        if function.module.split(".")[0] not in modules and job.spec.trainer.pod.image is not None:
            continue  # an own image brings its own modules
        yield from check_function(function.name, field=function.field, directory=base_dir, arguments=function.arguments)
    for name, path in modules.items():
        if path.is_dir() and job.spec.trainer.pod.image is None:
            yield UserError(
                field="spec.task: module",
                rule="must be one file: a ConfigMap holds no packages",
                got=name,
                fix="make it one file, or put it into an own image (spec.trainer.pod.image)",
            )


def _data_problems(job: RLJob, base_dir: Path) -> Iterator[UserError]:
    named: dict[str, str] = {}
    for field, given in _data_paths(job):
        path = base_dir / given
        if path.is_dir():
            rule = "must be a file: a ConfigMap holds no directories"
            yield UserError(field=field, rule=rule, got=given, fix=_ON_A_VOLUME)
        elif problems := list(check_data_file(path, field=field, given=given)):
            yield from problems
        elif not _KEY.match(path.name):
            rule = "must have a name of letters, digits, -, _ and . for a ConfigMap"
            yield UserError(field=field, rule=rule, got=path.name, fix="rename the file")
        elif named.setdefault(path.name, given) != given:
            rule = f"must have another name than {named[path.name]}: a ConfigMap holds no directories"
            yield UserError(field=field, rule=rule, got=given, fix="rename the file")


def _is_elsewhere(path: str) -> bool:
    """Whether a path is one in the pod, or a URL: nothing of this machine."""
    return Path(path).is_absolute() or is_url(path)


def _model_problems(job: RLJob) -> Iterator[UserError]:
    for field, given in model_directories(job):
        if not _is_elsewhere(given):
            yield UserError(
                field=field,
                rule="must be an absolute path in the pod: a model does not go into a ConfigMap",
                got=given,
                fix=_ON_A_VOLUME,
            )


def _reference_problems(job: RLJob) -> Iterator[UserError]:
    """Its generators load the frozen model themselves, and reach no hub."""
    frozen = job.spec.algorithm.teacher or job.spec.model
    if job.spec.frozen_pool is not None and frozen.path is None:
        yield UserError(
            field="spec.trainer.reference",
            rule="needs a frozen model with a path in the pods of its pool",
            got=frozen.key,
            fix="put the model on a volume of the pool's pod, or leave trainer.reference out",
        )


def _ranker_problems(job: RLJob) -> Iterator[UserError]:
    ranker = job.spec.scheduling.ranker
    path = getattr(ranker.value, "path", None) if ranker is not None else None
    if ranker is not None and path is not None and not Path(path).is_absolute():
        yield UserError(
            field=f"spec.scheduling.ranker.{ranker.key}.path",
            rule="must be an absolute path in the pod: a ranker does not go into a ConfigMap",
            got=path,
            fix=_ON_A_VOLUME,
        )


def _data_paths(job: RLJob) -> Iterator[tuple[str, str]]:
    """Field and value of each data set's path that is one on this machine."""
    for task in job.spec.task.tasks:
        path = getattr(task.dataset.value, "path", None)
        if path is not None and not _is_elsewhere(path):
            yield f"{task.field}.dataset.{task.dataset.key}.path", path


def _local_modules(job: RLJob, base_dir: Path) -> dict[str, Path]:
    """Modules beside the job file that the job's functions are in or that those import: name -> file, or directory of a package."""
    return local_modules([function.module.split(".")[0] for function in functions_of(job)], base_dir)


def _plugin_problems(job: RLJob) -> Iterator[UserError]:
    """What they are beside: a ConfigMap is changed by others than who may change an image."""
    for plugin in plugins_of(job.spec):
        if job.spec.trainer.pod.image is None and not plugin.is_shipped:
            yield UserError(
                field=plugin.field,
                rule="must be installed in the image on a cluster: it runs beside the job's certificates",
                got=plugin.named.class_,
                fix="put it into an own image (spec.trainer.pod.image)",
            )


def cluster_problems(job: RLJob, *, base_dir: Path) -> list[UserError]:
    """As `streamrl validate`, without this machine's packages, models and processes; with what has to fit into a ConfigMap."""
    return [*job_problems(job, base_dir=base_dir), *_plugin_problems(job), *bundle_problems(job, base_dir=base_dir)]
