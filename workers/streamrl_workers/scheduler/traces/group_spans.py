"""Spans of a group's life, from what the scheduler's process does and hears.

    group ─┬─ queue                       planned, until a sample of it is issued
           ├─ sample ─┬─ generate ── policy   at a generator, under a lease; the tokens of one weight version
           │          ├─ environment          a turn is answered
           │          └─ score
           ├─ ready                       scored, until the trainer is given it
           └─ train                       with the trainer, until its step is in the journal

Owns what has begun and not ended of the traced groups: bounded by the groups that live. Does not own weight versions (`version_spans.py`),
nor the ways by which it hears (`tracer.py`).

All instants are the scheduler's: when it sent a request, when an answer came. What a generator has measured (seconds in the engine) is laid before
the message that told of it, so clocks of other machines do not matter.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.evaluation import GROUP_BASE
from streamrl_workers.scheduler.records import StepTaken
from streamrl_workers.stream.archive import is_archived
from streamrl_workers.tasks.values import PlayTurn, Score, ScoreSample, TurnAnswer
from streamrl_workers.tracing import attribute_names as names
from streamrl_workers.tracing.spans import NS, SpanId, SpanTree, TraceSpan, Value, root_of

SCHEDULER, TRAINER, REWARDS = "scheduler", "trainer-0", "rewards"
Put = Callable[[Sequence[TraceSpan]], None]


@dataclass(slots=True)
class _PolicySpan:
    step: int
    attempt: int
    tokens: int
    begin_ns: int
    end_ns: int


@dataclass(slots=True)
class _SampleTrace:
    id: SpanId
    index: int
    begin_ns: int
    asked_ns: int = 0
    """When the reward or the environment was asked."""
    ended: bool = False


@dataclass(slots=True)
class _LeaseTrace:
    """A sample with a generator."""

    group: "_GroupTrace"
    sample: _SampleTrace
    number: int
    generator_id: str
    begin_ns: int
    prompt_tokens: int = 0
    policies: list[_PolicySpan] = field(default_factory=list)


@dataclass(slots=True)
class _GroupTrace:
    group_id: int
    tree: SpanTree
    attributes: dict[str, Value]
    queued: bool = True
    samples: dict[int, _SampleTrace] = field(default_factory=dict)
    scored_ns: int | None = None
    delivered_ns: int | None = None


class GroupSpans:
    """The traced groups that live."""

    def __init__(
        self, run: str, *, share_percent: int, requests: dict[str, Value], put: Put, clock: Callable[[], int]
    ) -> None:
        """`requests`: attributes of every generation."""
        self._run = run
        self._share_percent = share_percent
        self._requests = requests
        self._put = put
        self._clock = clock
        self._groups: dict[int, _GroupTrace] = {}
        self._leases: dict[int, _LeaseTrace] = {}
        self.trained: dict[int, int] = {}
        """Group -> its step, where its tree has been sent and the step may be taken again; that is not told again."""

    def is_traced(self, group_id: int) -> bool:
        """By the rule of the archive: what is traced can be read there too, if the archive's share is no less."""
        return group_id < GROUP_BASE and is_archived(group_id, share_percent=self._share_percent)

    # ---- generated

    def planned(self, group_id: int, *, prompt_index: int) -> None:
        """The group begins."""
        if self.is_traced(group_id):
            self._begin(group_id).attributes[names.PROMPT] = prompt_index

    def issued(self, generator_id: str, request: pb.SampleRequest) -> None:
        """A sample goes to a generator; the request is given its place in the trace."""
        group = self._get(request.group_id)
        if group is None:
            return
        now_ns = self._clock()
        if group.queued:
            group.queued = False
            group.tree.add("queue", process=SCHEDULER, over=(group.tree.begin_ns, now_ns))
        index = request.sample_index
        if index not in group.samples:
            group.samples[index] = _SampleTrace(group.tree.id("sample", index), index, now_ns)
        self._leases[request.lease] = _LeaseTrace(group, group.samples[index], request.lease, generator_id, now_ns)
        request.traceparent = group.tree.id("generate", request.lease).traceparent

    def progressed(self, generator_id: str, items: Iterable[pb.Progress]) -> None:
        """Tokens have come, or the end."""
        now_ns = self._clock()
        for item in items:
            lease = self._leases.get(item.lease)
            if lease is None or lease.generator_id != generator_id:
                continue
            lease.prompt_tokens = lease.prompt_tokens or len(item.prompt_tokens) >> 2
            for span in item.spans:
                _extend(lease, span, now_ns=now_ns)
            if item.finish_reason:
                engine_ns = max(lease.begin_ns, now_ns - round(item.generate_s * NS))
                if lease.policies:
                    lease.policies[0].begin_ns = min(engine_ns, lease.policies[0].end_ns)
                told: dict[str, Value] = {
                    names.GEN_AI_FINISH_REASONS: (item.finish_reason,),
                    names.GENERATE_S: item.generate_s,
                }
                self._end_lease(lease, outcome="finished", error=item.error, told=told)

    def cancelled(self, leases: Iterable[int]) -> None:
        """The scheduler takes them back."""
        for number in leases:
            if (lease := self._leases.get(number)) is not None:
                self._end_lease(lease, outcome="cancelled")

    def left(self, generator_id: str) -> None:
        """The generator is gone, with what it held."""
        for lease in [lease for lease in self._leases.values() if lease.generator_id == generator_id]:
            self._end_lease(lease, outcome="lost", error="its generator has left")

    def _end_lease(
        self, lease: _LeaseTrace, *, outcome: str, error: str = "", told: dict[str, Value] | None = None
    ) -> None:
        del self._leases[lease.number]
        tree, process = lease.group.tree, lease.generator_id
        at = tree.add(
            "generate",
            lease.number,
            parent=lease.sample.id,
            process=process,
            over=(lease.begin_ns, self._clock()),
            error=error,
            attributes={
                **self._requests,
                names.LEASE: lease.number,
                names.OUTCOME: outcome,
                names.GEN_AI_INPUT_TOKENS: lease.prompt_tokens,
                names.GEN_AI_OUTPUT_TOKENS: sum(policy.tokens for policy in lease.policies),
                **(told or {}),
            },
        )
        for number, policy in enumerate(lease.policies):
            tree.add(
                "policy",
                *(lease.number, number),
                parent=at,
                process=process,
                over=(policy.begin_ns, policy.end_ns),
                attributes={
                    names.VERSION: policy.step,
                    names.ATTEMPT: policy.attempt,
                    names.TOKENS: policy.tokens,
                },
                links=(version_root(self._run, attempt=policy.attempt, step=policy.step),),
            )

    # ---- scored

    def asked(self, question: ScoreSample | PlayTurn) -> None:
        """The reward or the environment is asked."""
        if (found := self._sample(question.group_id, question.sample_index)) is not None:
            found[1].asked_ns = self._clock()

    def answered(self, answer: Score | TurnAnswer) -> None:
        """It has answered."""
        found = self._sample(answer.group_id, answer.sample_index)
        if found is None or not found[1].asked_ns:
            return
        group, sample = found
        attributes: dict[str, Value] = {} if answer.reward is None else {names.REWARD: answer.reward}
        name = "score" if isinstance(answer, Score) else "environment"
        group.tree.add(
            name,
            *(sample.index, sample.asked_ns),
            parent=sample.id,
            process=REWARDS,
            over=(sample.asked_ns, self._clock()),
            error=answer.error,
            attributes=attributes,
        )
        if isinstance(answer, Score):
            self._end_sample(group, sample, attributes)

    def scored(self, group_id: int) -> None:
        """The group's samples go to the journal."""
        if (group := self._groups.get(group_id)) is not None:
            group.scored_ns = self._clock()

    def _end_sample(self, group: _GroupTrace, sample: _SampleTrace, attributes: dict[str, Value]) -> None:
        sample.ended = True
        told, over = {names.SAMPLE: sample.index, **attributes}, (sample.begin_ns, self._clock())
        group.tree.add("sample", sample.index, process=SCHEDULER, over=over, attributes=told)

    # ---- trained, or dropped

    def delivered(self, group_id: int) -> None:
        """The trainer is given the group."""
        group = self._get(group_id)
        if group is None:
            return
        now_ns = self._clock()
        if group.delivered_ns is not None:
            self._train(group, error="the trainer did not keep it")
        begin_ns = group.tree.begin_ns if group.scored_ns is None else group.scored_ns
        group.tree.add("ready", now_ns, process=SCHEDULER, over=(begin_ns, now_ns))
        group.delivered_ns = group.scored_ns = now_ns

    def stepped(self, taken: StepTaken) -> None:
        """A step has taken its groups."""
        attributes: dict[str, Value] = {names.STEP: taken.step, names.ATTEMPT: taken.attempt}
        if (step_s := taken.metrics.get("step_seconds")) is not None:
            attributes[names.STEP_S] = step_s
        links = (version_root(self._run, attempt=taken.attempt, step=taken.step + 1),)
        for group_id in taken.group_ids:
            if (group := self._groups.get(group_id)) is not None:
                self._train(group, attributes=attributes, links=links)
                self.ended(group_id, outcome="trained", step=taken.step)
                self.trained[group_id] = taken.step

    def _train(
        self,
        group: _GroupTrace,
        *,
        attributes: dict[str, Value] | None = None,
        links: tuple[SpanId, ...] = (),
        error: str = "",
    ) -> None:
        begin_ns = group.tree.begin_ns if group.delivered_ns is None else group.delivered_ns
        group.tree.add(
            "train",
            begin_ns,
            process=TRAINER,
            over=(begin_ns, self._clock()),
            attributes=attributes or {},
            links=links,
            error=error,
        )

    def settled(self, step: int) -> None:
        """Steps before this one are never taken again."""
        self.trained = {group_id: taken for group_id, taken in self.trained.items() if taken >= step}

    def ended(self, group_id: int, *, outcome: str, step: int | None = None) -> None:
        """The group's life is over: its tree is sent."""
        group = self._groups.pop(group_id, None)
        if group is None:
            return
        for lease in [lease for lease in self._leases.values() if lease.group is group]:
            self._end_lease(lease, outcome="cancelled")
        for sample in group.samples.values():
            if not sample.ended:
                self._end_sample(group, sample, {})
        group.attributes |= {names.OUTCOME: outcome} | ({} if step is None else {names.STEP: step})
        self._put(group.tree.end(end_ns=self._clock(), attributes=group.attributes))

    def end_all(self, *, outcome: str) -> None:
        """The run is over."""
        for group_id in list(self._groups):
            self.ended(group_id, outcome=outcome)

    # ---- inside

    def _begin(self, group_id: int) -> _GroupTrace:
        root = root_of(self._run, "group", group_id)
        tree = SpanTree(root, name="group", process=SCHEDULER, begin_ns=self._clock())
        group = _GroupTrace(group_id, tree, {names.GROUP: group_id})
        self._groups[group_id] = group
        return group

    def _get(self, group_id: int) -> _GroupTrace | None:
        """A traced group; one that an earlier scheduler has planned begins here."""
        group = self._groups.get(group_id)
        if group is None and self.is_traced(group_id) and group_id not in self.trained:
            group = self._begin(group_id)
            group.attributes[names.RESUMED] = True
        return group

    def _sample(self, group_id: int, index: int) -> tuple[_GroupTrace, _SampleTrace] | None:
        group = self._groups.get(group_id)
        sample = None if group is None else group.samples.get(index)
        return None if group is None or sample is None else (group, sample)


def _extend(lease: _LeaseTrace, span: pb.VersionSpan, *, now_ns: int) -> None:
    last = lease.policies[-1] if lease.policies else None
    if last is not None and (last.step, last.attempt) == (span.step, span.attempt):
        last.tokens += span.tokens
        last.end_ns = now_ns
    else:
        begin_ns = lease.begin_ns if last is None else last.end_ns
        lease.policies.append(_PolicySpan(span.step, span.attempt, span.tokens, begin_ns, now_ns))


def version_root(run: str, *, attempt: int, step: int) -> SpanId:
    """Where the trace of a weight version begins."""
    return root_of(run, "version", attempt, step)
