"""The status that is stored, as values; and back into plain data.

Reading never fails: what this operator does not know or cannot read (a newer one's field, another controller's) is left
out, item by item. The conditions are the job's memory: one bad entry must not make an ended job begin again.
"""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from streamrl.spec.base import SpecModel
from streamrl.status import GeneratorPoolStatus, RLJobStatus
from streamrl_operator.planning.values import Object

_Status = TypeVar("_Status", bound=SpecModel)


def job_status(job: Object) -> RLJobStatus:
    """Of an RLJob as stored; empty at the first visit."""
    return _read(RLJobStatus, job.get("status"))


def pool_status(pool: Object | None) -> GeneratorPoolStatus:
    """Of a GeneratorPool as stored; empty while there is none."""
    return _read(GeneratorPoolStatus, None if pool is None else pool.get("status"))


def plain(status: SpecModel) -> dict[str, Any]:
    """As it is written: what is unknown or empty is left out."""
    return status.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def _read(model: type[_Status], document: object) -> _Status:
    if not isinstance(document, Mapping):
        return model()
    whole = _valid(model, document)
    if whole is not None:
        return whole
    kept = {key: _kept(model, key, value) for key, value in document.items()}
    return _valid(model, {key: value for key, value in kept.items() if value is not None}) or model()


def _kept(model: type[SpecModel], key: str, value: object) -> object:
    """The value, or the items of it, that can be read; None if nothing can."""
    if isinstance(value, list):
        value = [item for item in value if _valid(model, {key: [item]}) is not None]
    return None if _valid(model, {key: value}) is None else value


def _valid(model: type[_Status], document: Mapping[str, Any]) -> _Status | None:
    try:
        return model.model_validate_json(json.dumps(document, default=_plain_mapping))
    except ValidationError:
        return None


def _plain_mapping(value: object) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a status is plain data, got {type(value).__name__}")
