"""Tells the spans of a run: watches what the scheduler's process hears and does, and decides nothing.

    events of peers, results of the task pool, effects of the core --> GroupSpans, VersionSpans --> SpanSender --> endpoint

The scheduler alone tells them, for every process: whatever a generator or the trainer does begins with a message of the scheduler, and ends with
one to it. So there is one clock, nothing to agree on, and nothing to send from elsewhere. vLLM tells its own spans: a request carries its place.

Invariant: a mistake here ends tracing, not the run.
"""

import logging
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.errors import UserError
from streamrl.files import MissingFileError, read_json
from streamrl.keys import FILE_TRACE
from streamrl.spec import RLJob
from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler.records import Checkpointed, Dropped, Planned, Record, Recovered, Scored, StepTaken
from streamrl_workers.scheduler.traces.group_spans import GroupSpans
from streamrl_workers.scheduler.traces.version_spans import VersionSpans
from streamrl_workers.stream.run_folder import write_json_atomically
from streamrl_workers.tasks.values import PlayTurn, Result, Score, ScoreSample, TurnAnswer
from streamrl_workers.tracing import attribute_names as names
from streamrl_workers.tracing.spans import SpanClock, Value

if TYPE_CHECKING:
    from streamrl_workers.tracing.otlp import SpanSender

_RUN_BYTES = 16
_RUN_KEY = "run"

log = logging.getLogger("streamrl.traces")


class Tracer:
    """The traces of one run."""

    def __init__(self, job: RLJob, *, run: str, recovered: Recovered, sender: "SpanSender") -> None:
        """`run`: what `run_number` says. `recovered`: groups of its steps have been sent before."""
        tracing, clock = job.spec.tracing, SpanClock()
        assert tracing is not None
        self._sender = sender
        self._broken = False
        self._groups = GroupSpans(
            run, share_percent=tracing.share_percent, requests=_requests(job), put=sender.put, clock=clock
        )
        self._versions = VersionSpans(run, put=sender.put, clock=clock)
        for step, group_ids in recovered.compositions.items():
            self._groups.trained |= {id_: step for id_ in group_ids if self._groups.is_traced(id_)}
        self.effects: Mapping[type, Callable[[Any], None]] = {
            fx.ToGenerator: self._guarded(self._to_generator),
            fx.DeliverGroup: self._guarded(lambda effect: self._groups.delivered(effect.group_id)),
            fx.Write: self._guarded(lambda effect: self._wrote(effect.record)),
            fx.Finished: self._guarded(self._finished),
            ScoreSample: self._guarded(self._groups.asked),
            PlayTurn: self._guarded(self._groups.asked),
        }
        """By the effect's type: called before it is carried out."""
        self.result = self._guarded(self._result)
        """Called with each result of the task pool, before the core is."""
        self.event = self._guarded(self._event)
        """Called with a peer's name and its event, before the core is; None: it has left."""

    def spans(self) -> tuple[int, int]:
        """How many were sent, and how many are lost."""
        return self._sender.sent, self._sender.lost

    def close(self) -> None:
        """Send what waits."""
        self._sender.close()

    def _guarded(self, watch: Callable[..., None]) -> Callable[..., None]:
        def guarded(*args: object) -> None:
            if self._broken:
                return
            try:
                watch(*args)
            except Exception:
                self._broken = True
                log.exception("a mistake of our own: nothing more is traced")

        return guarded

    # ---- what is done

    def _to_generator(self, effect: fx.ToGenerator) -> None:
        command = effect.command
        match command.WhichOneof("command"):
            case "issue":
                for request in command.issue.items:
                    self._groups.issued(effect.generator_id, request)
            case "cancel":
                self._groups.cancelled(command.cancel.leases)
            case "weights":
                self._versions.told(effect.generator_id, command.weights)

    def _wrote(self, record: Record) -> None:
        match record:
            case Planned():
                self._groups.planned(record.group_id, prompt_index=record.prompt_index)
            case Scored():
                self._groups.scored(record.group_id)
            case Dropped():
                self._groups.ended(record.group_id, outcome=record.reason)
            case StepTaken():
                self._groups.stepped(record)
                self._versions.stepped(record)
            case Checkpointed():
                self._groups.settled(record.step)

    def _finished(self, _: fx.Finished) -> None:
        self._groups.end_all(outcome="run_ended")
        self._versions.end_all()

    # ---- what is heard

    def _result(self, result: Result) -> None:
        if isinstance(result, Score | TurnAnswer):
            self._groups.answered(result)

    def _event(self, peer: str, event: Any) -> None:  # noqa: ANN401 - either direction's event
        if event is None:
            self._groups.left(peer)
            self._versions.left(peer)
            return
        match event.WhichOneof("event"):
            case "progress":
                self._groups.progressed(peer, event.progress.items)
            case "weights_loaded":
                self._versions.loaded(peer, event.weights_loaded)
            case "weights_failed":
                failed = event.weights_failed
                self._versions.failed(peer, failed.version, error=failed.error)
            case "published":
                self._versions.published(event.published)


def make_tracer(job: RLJob, *, run_dir: Path, recovered: Recovered) -> Tracer | None:
    """None: the job traces nothing.

    Raises:
        UserError: OpenTelemetry is not installed.
    """
    tracing = job.spec.tracing
    if tracing is None or not tracing.share_percent:
        return None
    try:
        from streamrl_workers.tracing.otlp import SpanSender, otlp_exporter
    except ImportError:
        rule, fix = "needs OpenTelemetry's packages", "install streamrl[tracing], or leave tracing out"
        raise UserError(field="spec.tracing", rule=rule, fix=fix) from None
    common = {names.JOB: job.metadata.name, names.NAMESPACE: job.metadata.namespace or ""}
    sender = SpanSender(otlp_exporter(tracing.endpoint), endpoint=tracing.endpoint, common=common)
    return Tracer(job, run=run_number(run_dir), recovered=recovered, sender=sender)


def run_number(run_dir: Path) -> str:
    """The number that all ids of the run's traces come from: made once, kept in the run folder."""
    path = run_dir / FILE_TRACE
    try:
        return str(read_json(path)[_RUN_KEY])
    except MissingFileError:
        run = secrets.token_hex(_RUN_BYTES)
        write_json_atomically(path, {_RUN_KEY: run})
        return run
    except (KeyError, TypeError):
        raise UserError(field=str(path), rule='must say {"run"}', fix="remove it: traces get other ids") from None


def _requests(job: RLJob) -> dict[str, Value]:
    model, sampling = job.spec.model, job.spec.task.sampling
    named = model.hugging_face.name if model.hugging_face else model.path.directory if model.path else model.key
    return {
        names.GEN_AI_OPERATION: "text_completion",
        names.GEN_AI_MODEL: named,
        names.GEN_AI_MAX_TOKENS: sampling.max_tokens,
        names.GEN_AI_TEMPERATURE: sampling.temperature,
    }
