"""From plain data (a parsed YAML or JSON document) to a model, above all an `RLJob`, or to one line per mistake."""

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from streamrl.errors import UserError, UserErrors
from streamrl.files import read_json
from streamrl.spec.rljob import RLJob
from streamrl.spec.schema import Schema, allowed, children, is_amount, path_text, plain_schema, refusals, schema_at

DOCUMENT = "(document)"
"""The field of an error about the whole document."""
MISSING = "is required"


PEERS_NAMES = {
    "beta": "algorithm.grpo.referenceKl.coefficient",
    "kl_coef": "algorithm.grpo.referenceKl.coefficient",
    "kl_loss_coef": "algorithm.grpo.referenceKl.coefficient",
    "use_kl_loss": "algorithm.grpo.referenceKl",
    "epsilon": "algorithm.grpo.clipLow and spec.algorithm.grpo.clipHigh",
    "epsilon_high": "algorithm.grpo.clipHigh",
    "clip_ratio": "algorithm.grpo.clipLow and spec.algorithm.grpo.clipHigh",
    "clip_ratio_low": "algorithm.grpo.clipLow",
    "clip_ratio_high": "algorithm.grpo.clipHigh",
    "num_generations": "task.groupSize",
    "rollouts_per_example": "task.groupSize",
    "lr": "trainer.learningRate",
    "max_grad_norm": "trainer.gradientClipNorm",
    "warmup_steps": "trainer.warmUpSteps",
    "gradient_checkpointing": "trainer.activationCheckpointing",
    "use_vllm": "generators[].engine.vllm",
    "max_completion_length": "task.sampling.maxTokens",
    "max_response_length": "task.sampling.maxTokens",
    "reward_funcs": "task.rewards",
    "max_steps": "pipeline.steps",
    "async_level": "pipeline.maxStalenessSteps",
}
"""Settings of TRL, verl and prime-rl whose names are not like ours, and where they are here."""

Model = TypeVar("Model", bound=BaseModel)


def parse_job(document: object) -> RLJob:
    """Validate `document` as an RLJob. Raises `UserErrors`: one `UserError` for each mistake."""
    return parse_document(document, model=RLJob, rule="must be a mapping with apiVersion, kind, metadata, spec")


def parse_document(document: object, *, model: type[Model], rule: str, fix: str = "") -> Model:
    """Validate `document` as a `model`.

    Args:
        document: plain data.
        model: of the contract's base, whose rules are told by the field.
        rule: what a document that is no mapping breaks.
        fix: what to do then.

    Raises:
        UserErrors: one `UserError` for each mistake.
    """
    if not isinstance(document, Mapping):
        raise UserErrors([UserError(field=DOCUMENT, rule=rule, got=document, fix=fix)])
    try:
        return model.model_validate_json(json.dumps(document))
    except ValidationError as error:
        root = plain_schema(model)
        told = [_explain(details, root=root) for details in _own_mistakes(error.errors())]
        raise UserErrors(_without_misspelt(told)) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise UserErrors([UserError(field=DOCUMENT, rule=f"must be plain data: {error}")]) from None


def nearest(name: str, known: Iterable[str]) -> str:
    """Ask whether the known name that is most like `name` was meant; empty if none is like it."""
    by_lower_case = {candidate.lower(): candidate for candidate in known}
    found = difflib.get_close_matches(name.lower().replace("_", ""), list(by_lower_case), n=1, cutoff=0.6)
    return _did_you_mean(by_lower_case[found[0]]) if found else ""


def _did_you_mean(name: str) -> str:
    return f"did you mean {name}?"


def suggest(name: str, known: Iterable[str]) -> str:
    """Advice for a name that is not known: the nearest one, or all of them."""
    names = list(known)
    return nearest(name, names) or (f"known: {', '.join(names)}" if names else "")


def unknown_field(field: str, *, name: str, section: Schema) -> UserError:
    """The error for a field `name` that a section does not have; `field`: how it is told."""
    if why := refusals(section).get(name):
        return UserError(field=field, rule=f"is refused: {why}")
    in_job = field.rpartition(" ")[2].startswith("spec.")  # and not an option of a plug-in, which has fields of its own
    if in_job and (here := PEERS_NAMES.get(name)):
        return UserError(field=field, rule="is not a known field", fix=f"here it is spec.{here}")
    return UserError(field=field, rule="is not a known field", fix=suggest(name, children(section)))


def _own_mistakes(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """Without the lists that are too short only because their items are wrong."""
    places = [error["loc"] for error in errors]
    return [
        error
        for error in errors
        if error["type"] != "too_short" or not any(place[:-1][: len(error["loc"])] == error["loc"] for place in places)
    ]


def _without_misspelt(errors: list[UserError]) -> list[UserError]:
    """Without the required fields that are there under a name like theirs: the line of that name says so."""
    meant = {(error.field.rpartition(".")[0], error.fix) for error in errors}
    return [
        error
        for error in errors
        if error.rule != MISSING
        or (error.field.rpartition(".")[0], _did_you_mean(error.field.rpartition(".")[2])) not in meant
    ]


class _Null:
    """How an explicit null is shown."""

    def __repr__(self) -> str:
        return "null"


def _explain(details: ErrorDetails, *, root: Schema) -> UserError:
    location = details["loc"]
    field = path_text(location) or DOCUMENT
    kind = details["type"]
    schema = schema_at(path_text(location), root=root)
    if kind == "json_invalid":  # half of a surrogate pair: the one text that JSON writes and UTF-8 cannot
        return UserError(field=DOCUMENT, rule=f"must be plain data: {details['msg']}")
    if kind == "missing":
        return UserError(field=field, rule=MISSING, fix=f"give {allowed(schema or {})}")
    if kind == "extra_forbidden":
        return unknown_field(
            field, name=str(location[-1]), section=schema_at(path_text(location[:-1]), root=root) or {}
        )
    if kind == "value_error" or schema is None:
        return UserError(field=field, rule=details["msg"].removeprefix("Value error, "))
    return _broken_rule(field, schema=schema, got=details["input"])


def _broken_rule(field: str, *, schema: Schema, got: object) -> UserError:
    for _ in range(field.count("[", len(field.rstrip("[0123456789]")))):  # one for each index behind the last name
        schema = schema.get("items", schema)
    shown = _Null() if got is None else got
    return UserError(field=field, rule=f"must be {allowed(schema)}", got=shown, fix=_remedy(schema, got))


def _remedy(schema: Schema, got: object) -> str:
    if got is None:
        return "give a value or remove the line"
    if isinstance(got, str) and "enum" in schema:
        return nearest(got, schema["enum"])  # the rule lists them all
    if isinstance(got, str) and schema.get("type") in ("integer", "number") and got.strip().isdigit():
        return "remove the quotes"
    if isinstance(got, float) and is_amount(schema):
        return "write it in thousandths (500m), in a smaller unit, or in quotes"
    if isinstance(got, (int, float)) and not isinstance(got, bool) and schema.get("type") == "string":
        return "put it in quotes"
    return ""


def read_job(path: Path, *, beneath: Path | None = None) -> RLJob:
    """The job that the runner stored in a run folder, as every worker reads it; `beneath` as of `open_regular`.

    Raises `UserError`: the file cannot be read, or is not JSON. Raises `UserErrors`: it is not a valid job.
    """
    return parse_job(read_json(path, beneath=beneath))
