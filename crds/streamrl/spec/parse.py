"""From plain data (a parsed YAML or JSON document) to an `RLJob`, or to one line per mistake."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from streamrl.errors import UserError, UserErrors
from streamrl.spec.rljob import RLJob


def parse_job(document: object) -> RLJob:
    """Validate `document` as an RLJob.

    Raises:
        UserErrors: one `UserError` for each mistake, in the order of the document.
    """
    if not isinstance(document, Mapping):
        raise UserErrors([UserError(field="(document)", rule="must be a mapping with apiVersion, kind, metadata, spec", got=document)])
    try:
        return RLJob.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise UserErrors([_explain(details) for details in error.errors()]) from None
    except (TypeError, ValueError) as error:
        raise UserErrors([UserError(field="(document)", rule=f"must be plain data: {error}")]) from None


def _explain(details: ErrorDetails) -> UserError:
    field = ".".join(str(part) for part in details["loc"]) or "(document)"
    kind = details["type"]
    if kind == "missing":
        return UserError(field=field, rule="is required", fix="add it")
    if kind == "extra_forbidden":
        return UserError(field=field, rule="is not a known field", fix="`streamrl explain` lists the known ones")
    rule = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
    got: Any = details["input"]
    return UserError(field=field, rule=rule[:1].lower() + rule[1:], got=None if isinstance(got, dict) else got)
