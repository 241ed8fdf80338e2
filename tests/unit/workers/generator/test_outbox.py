"""The outbox: every token in exactly one message, under its version, whatever the sequence."""

from hypothesis import given
from hypothesis import strategies as st

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.generator.engines.base import Delta
from streamrl_workers.generator.outbox import GeneratorOutbox
from streamrl_workers.stream.packing import BATCH_BYTES, unpack_float32, unpack_int32


def version(step: int, attempt: int = 1) -> pb.VersionName:
    return pb.VersionName(attempt=attempt, step=step)


def delta(lease: int, tokens: tuple[int, ...], *, step: int = 0, end: bool = False, prompt=None) -> Delta:
    return Delta(
        lease=lease,
        tokens=tokens,
        logprobs=tuple(-float(token) for token in tokens),
        version=step,
        finish_reason="stop" if end else None,
        text="done" if end else None,
        prompt_tokens=prompt,
    )


_events = st.lists(
    st.one_of(
        st.tuples(st.just("gain"), st.integers(0, 3), st.integers(0, 5)),
        st.tuples(st.just("end"), st.integers(0, 3), st.integers(0, 5)),
        st.tuples(st.just("cancel"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("swap"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("send"), st.integers(0, 1), st.just(0)),
    ),
    max_size=60,
)


@given(_events)
def test_every_token_is_sent_once_under_its_version(events):
    outbox = GeneratorOutbox()
    outbox.admit(range(4), now_s=0.0)
    name, made = version(0), 0
    expected: dict[int, list[tuple[int, int, int]]] = {lease: [] for lease in range(4)}
    running, cancelled, sent = set(range(4)), set(), []
    for kind, lease, count in events:
        if kind in ("gain", "end"):
            tokens = tuple(range(made, made + count))
            made += count
            prompt = None if expected[lease] else (7, 8)
            outbox.take(
                [delta(lease, tokens, step=name.step, end=kind == "end", prompt=prompt)], version=name, now_s=1.0
            )
            if lease in running:
                expected[lease] += [(token, name.attempt, name.step) for token in tokens]
            running -= {lease} if kind == "end" else set()
        elif kind == "cancel":
            outbox.forget([lease])
            cancelled |= {lease} & running
            running.discard(lease)
        elif kind == "swap":
            name = version(name.step + 1, attempt=name.attempt + lease)
        else:
            sent += outbox.pop(running=bool(lease))
    sent += outbox.pop(running=True)
    assert outbox.pop(running=True) == []
    got: dict[int, list[tuple[int, int, int]]] = {lease: [] for lease in range(4)}
    for item in (item for event in sent for item in event.progress.items):
        tokens = unpack_int32(item.tokens)
        assert list(unpack_float32(item.logprobs)) == [-float(token) for token in tokens]
        versions = [(span.attempt, span.step) for span in item.spans for _ in range(span.tokens)]
        assert len(versions) == len(tokens)
        got[item.lease] += [(token, *name) for token, name in zip(tokens, versions, strict=True)]
    for lease in range(4):
        if lease in cancelled:
            assert got[lease] == expected[lease][: len(got[lease])]
        else:
            assert got[lease] == expected[lease]


def test_the_first_message_of_a_lease_has_the_prompt_and_the_last_the_end():
    outbox = GeneratorOutbox()
    outbox.admit([5], now_s=10.0)
    outbox.take([delta(5, (1, 2), prompt=(9, 9))], version=version(0), now_s=11.0)
    (first,) = outbox.pop(running=True)[0].progress.items
    outbox.take([delta(5, (3,), end=True)], version=version(0), now_s=12.5)
    assert outbox.has_ended
    (last,) = outbox.pop(running=False)[0].progress.items
    assert list(unpack_int32(first.prompt_tokens)) == [9, 9]
    assert (first.finish_reason, first.text) == ("", "")
    assert last.prompt_tokens == b""
    assert (last.finish_reason, last.text, last.generate_s) == ("stop", "done", 2.5)
    assert list(unpack_int32(last.tokens)) == [3]


def test_a_request_refused_at_once_ends_with_its_error():
    outbox = GeneratorOutbox()
    outbox.admit([1], now_s=0.0)
    refused = Delta(lease=1, tokens=(), logprobs=(), version=0, finish_reason="error", error="prompt too long")
    outbox.take([refused], version=version(0), now_s=0.0)
    (item,) = outbox.pop(running=False)[0].progress.items
    assert (item.finish_reason, item.error, item.tokens) == ("error", "prompt too long", b"")


def test_messages_are_bounded_in_bytes():
    outbox = GeneratorOutbox()
    per_request = BATCH_BYTES // 8 // 3 - 100  # room for what else a message has
    outbox.admit(range(7), now_s=0.0)
    tokens = tuple(range(per_request))
    outbox.take([delta(lease, tokens, end=True) for lease in range(7)], version=version(0), now_s=0.0)
    batches = [event.progress for event in outbox.pop(running=False)]
    assert [len(batch.items) for batch in batches] == [3, 3, 1]
    assert all(batch.ByteSize() < BATCH_BYTES + 100 for batch in batches)


def test_a_cleared_book_knows_nobody():
    outbox = GeneratorOutbox()
    outbox.admit([1], now_s=0.0)
    outbox.clear()
    outbox.take([delta(1, (1,), end=True)], version=version(0), now_s=0.0)
    assert not outbox.has_ended
    assert outbox.tokens == 0
