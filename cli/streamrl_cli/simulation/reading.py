"""From a file to a `Scenario`, or to one line per mistake, each with its place.

Owns what a file of a scenario or of lengths may hold, and which scenario an RLJob with simulated engines is: the same run
without processes, in virtual time. What a job does not say of time keeps the scenario's default. Does not own the rules
(`scenario.py`), what a mistake is called (`streamrl.spec.parse`), nor YAML.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from streamrl.errors import UserError, UserErrors
from streamrl.files import parse_json, read_text
from streamrl.spec import RLJob
from streamrl.spec.generators import GeneratorPool
from streamrl.spec.parse import parse_document, parse_job
from streamrl_cli.jobfile import documents_in, located
from streamrl_cli.simulation.scenario import MOST_TOKENS, Scenario
from streamrl_cli.yaml_document import Document

MAX_FILE_BYTES = 16 * 2**20
"""A scenario may hold a table of lengths."""
_EXAMPLE = "begin with examples/simulations/skewed.yaml"
WITHIN_GROUP_PERCENT = 50.0
"""As the simulated engine draws lengths (`engines/simulated_samples.py`)."""


def read_scenario(path: Path) -> Scenario:
    """The scenario of a file; an RLJob with simulated engines is one as well.

    Raises `UserError` or `UserErrors`: what is wrong, with file and line.
    """
    document = _document(path)
    try:
        if isinstance(document.data, Mapping) and document.data.get("kind") == "RLJob":
            return scenario_of(parse_job(document.data))
        return parse_scenario(document.data)
    except UserErrors as errors:
        raise UserErrors(located(errors.errors, path=path, lines=document.lines)) from None


def parse_scenario(data: object) -> Scenario:
    """A scenario of plain data. Raises `UserErrors`: one `UserError` for each mistake."""
    rule = "must be a mapping with pipeline, pools, lengths"
    return parse_document(data, model=Scenario, rule=rule, fix=_EXAMPLE)


def read_rows(path: Path) -> tuple[tuple[int, ...], ...]:
    """Lengths by prompt from a file of JSON Lines. Raises `UserError`: at the first line that is no list of lengths."""
    rows = []
    for number, line in enumerate(read_text(path, most_bytes=MAX_FILE_BYTES).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError:
            row = line
        if not isinstance(row, list) or not row or not all(_is_length(value) for value in row):
            raise UserError(
                field=f"{path}:{number}", rule=f"must be a list of whole numbers from 1 to {MOST_TOKENS}", got=row
            )
        rows.append(tuple(row))
    if not rows:
        raise UserError(field=str(path), rule="holds no lengths", fix="write one list a line: [812, 640, 3010]")
    return tuple(rows)


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_TOKENS


def _document(path: Path) -> Document:
    documents = documents_in(read_text(path, most_bytes=MAX_FILE_BYTES), path=path)
    if len(documents) != 1:
        raise UserError(field=str(path), rule=f"must hold one scenario, holds {len(documents)}", fix=_EXAMPLE)
    return documents[0]


def scenario_of(job: RLJob) -> Scenario:
    """The scenario that the job's own engines describe.

    Raises `UserErrors`: the job has real engines, or what the simulator cannot take over.
    """
    mistakes = list(_mistakes(job))
    if mistakes:
        raise UserErrors(mistakes)
    try:
        return Scenario.model_validate(_fields(job))
    except ValidationError as error:  # what is allowed there and not here is in the engines alone
        rules = [details["msg"].removeprefix("Value error, ") for details in error.errors()]
        raise UserErrors([UserError(field="spec.generators", rule=rule) for rule in rules]) from None


def _fields(job: RLJob) -> dict[str, Any]:
    spec = job.spec
    engine, trainer = spec.generators[0].engine.value, spec.trainer.engine.value
    return {
        "seed": spec.seed,
        "groupSize": spec.task.group_size,
        "maxTokens": spec.task.sampling.max_tokens,
        "pipeline": spec.pipeline,
        "scheduling": spec.scheduling,
        "pools": tuple(_pool(pool) for pool in spec.generators),
        "lengths": {
            "logNormal": {"medianTokens": engine.mean_tokens, "sigma": engine.sigma},
            "withinGroupPercent": WITHIN_GROUP_PERCENT,
        },
        "trainer": {
            "secondsPerToken": trainer.seconds_per_token,
            "secondsPerStep": trainer.seconds_per_step,
            "weightBytes": trainer.weight_bytes,
            "checkpointIntervalSteps": spec.storage.checkpoints.interval_steps,
            "costPerHour": spec.trainer.cost_per_hour,
        },
    }


def _pool(pool: GeneratorPool) -> dict[str, Any]:
    engine = pool.engine.value
    scaled = [{"batch": p.batch, "milliseconds": p.milliseconds * engine.time_scale} for p in engine.latency]
    return {
        "name": pool.name,
        "scaling": pool.scaling,
        "slots": engine.slots,
        "latency": tuple(scaled),
        "costPerHour": pool.cost_per_hour,
    }


def _mistakes(job: RLJob) -> list[UserError]:
    spec = job.spec
    if spec.trainer.engine.simulated is None:
        rule = "must be simulated: real engines have no model of their time"
        return [UserError(field="spec.trainer.engine", rule=rule, fix="write a scenario: docs/simulator.md")]
    found = []
    engines = [pool.engine.value for pool in spec.generators]
    if len({(engine.mean_tokens, engine.sigma) for engine in engines}) > 1:
        rule = "must have the same meanTokens and sigma: a length belongs to the prompt here, not to the pool"
        found.append(UserError(field="spec.generators", rule=rule))
    if any(engine.time_scale == 0 for engine in engines):
        found.append(UserError(field="spec.generators", rule="must have a timeScale above 0", got=0))
    if spec.task.environment is not None:
        found.append(UserError(field="spec.task.environment", rule="is not simulated: samples have one turn"))
    if getattr(spec.algorithm.value, "dynamic_sampling", None) is not None:
        found.append(UserError(field="spec.algorithm", rule="must be without dynamicSampling: rewards are all equal"))
    if spec.scheduling.ranker is not None:
        rule = "reads real prompts, which a simulation does not have"
        found.append(UserError(field="spec.scheduling.ranker", rule=rule, fix="write a scenario with its ranker"))
    return found
