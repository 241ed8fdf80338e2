"""Deltas make the very bytes of the next version, or say in one line why not."""

import random
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_workers.weights import delta as delta_module
from streamrl_workers.weights.delta import DeltaError, apply, encode
from streamrl_workers.weights.hashing import bytes_hash

BLOCK = 64
WIDTHS = {"uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "int64": 8}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(delta_module, "_BLOCK_ELEMENTS", BLOCK)


def encoded(base: bytes, new: bytes, *, width: int, most_share: float = 1000.0) -> bytes | None:
    return encode(
        memoryview(base),
        memoryview(new),
        width=width,
        base_hash=bytes_hash(memoryview(base)),
        new_hash=bytes_hash(memoryview(new)),
        most_share=most_share,
    )


def applied(delta: bytes, base: bytes, new: bytes) -> bytes:
    before, names = bytes(base), {"base_hash": bytes_hash(memoryview(base)), "new_hash": bytes_hash(memoryview(new))}
    made, in_place = bytearray(len(base)), bytearray(base)
    apply(memoryview(delta), base=memoryview(base), into=memoryview(made), **names)
    apply(memoryview(delta), base=memoryview(in_place), into=memoryview(in_place), **names)
    assert made == in_place
    assert base == before, "the base was written to"
    return bytes(made)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[int, bytes, bytes]:
    """Width, base and new: any bytes, so NaNs of any payload too; none, some or all elements changed, by a little or anyhow."""
    width = draw(st.sampled_from(sorted(WIDTHS.values())))
    elements = draw(st.sampled_from([0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 700]))
    share = draw(st.sampled_from([0.0, 0.01, 0.2, 0.3, 1.0]))
    by_little = draw(st.booleans())
    seed = random.Random(draw(st.integers(0, 2**32)))
    base = np.frombuffer(seed.randbytes(elements * width), dtype=f"<u{width}")
    new = base.copy()
    for place in range(elements):
        if seed.random() < share:
            change = seed.choice((1, -1, 2)) if by_little else seed.getrandbits(8 * width)
            new[place] = (int(new[place]) + change) % 2 ** (8 * width)
    return width, base.tobytes(), new.tobytes()


@given(pairs())
@settings(max_examples=150, deadline=None)
def test_a_delta_makes_the_very_bytes(pair):
    width, base, new = pair
    delta = encoded(base, new, width=width)
    assert delta is not None
    assert applied(delta, base, new) == new


@pytest.mark.parametrize("name", WIDTHS)
def test_values_that_are_no_numbers_keep_their_payload(name):
    width = WIDTHS[name]
    ones = b"\xff" * width
    base, new = ones * 100, (b"\x7f" * width + ones) * 50
    delta = encoded(base, new, width=width)
    assert delta is not None
    assert applied(delta, base, new) == new


def test_a_width_that_does_not_divide_the_bytes_is_read_by_bytes():
    delta = encoded(b"abcde", b"abcdf", width=4)
    assert delta is not None
    assert applied(delta, b"abcde", b"abcdf") == b"abcdf"


def test_what_is_not_worth_it_is_none():
    base, new = bytes(4000), random.Random(0).randbytes(4000)
    assert encoded(base, new, width=2, most_share=0.5) is None
    assert encoded(bytes(10), bytes(10), width=2, most_share=0.5) is None, "smaller than its own header"


def test_few_small_changes_are_few_bytes(monkeypatch):
    monkeypatch.undo()  # blocks of their real size
    rng = np.random.default_rng(0)
    base = rng.integers(0, 2**16, 2**21 + 5, dtype=np.uint16)
    new = base.copy()
    changed = rng.random(len(base)) < 0.01
    new[changed] += rng.choice(np.array([1, 2**16 - 1], dtype=np.uint16), int(changed.sum()))
    delta = encoded(base.tobytes(), new.tobytes(), width=2)
    assert delta is not None
    assert len(delta) < 0.0075 * base.nbytes, (
        "8 bits for a gap, 1 for the sign, 1 for an empty upper byte: 0.63 % and the tables"
    )
    assert applied(delta, base.tobytes(), new.tobytes()) == new.tobytes()


def small() -> tuple[bytes, bytes, bytes]:
    base = random.Random(1).randbytes(2 * (BLOCK + 9))
    new = bytearray(base)
    for place in (0, 40, len(new) - 1):
        new[place] ^= 1
    delta = encoded(base, bytes(new), width=2)
    assert delta is not None
    return delta, base, bytes(new)


def test_every_flipped_bit_is_refused():
    delta, base, new = small()
    for place in range(8 * len(delta)):
        flipped = bytearray(delta)
        flipped[place // 8] ^= 1 << place % 8
        with pytest.raises(DeltaError):
            applied(bytes(flipped), base, new)


def test_every_cut_and_every_tail_is_refused():
    delta, base, new = small()
    for size in range(len(delta)):
        with pytest.raises(DeltaError):
            applied(delta[:size], base, new)
    with pytest.raises(DeltaError, match="damaged"):
        applied(delta + b"\0", base, new)


def signed(delta: bytes) -> bytes:
    """With the right hash at its end: from somebody who knows how deltas are made."""
    body = delta[:-32]
    return body + bytes_hash(memoryview(body))


@given(place=st.integers(0, 10**6), value=st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_what_a_liar_makes_is_refused_or_bytes_of_a_slice(place, value):
    delta, base, new = small()
    forged = bytearray(delta)
    forged[place % (len(delta) - 32)] = value
    try:
        assert len(applied(signed(bytes(forged)), base, new)) == len(new), "the puller verifies them"
    except DeltaError as error:
        assert "\n" not in str(error)


def test_trailing_bytes_that_are_hashed_are_refused():
    delta, base, new = small()
    with pytest.raises(DeltaError, match="3 bytes follow its last block"):
        applied(signed(delta[:-32] + b"abc" + bytes(32)), base, new)


def test_a_delta_of_another_base_is_refused_and_so_is_one_applied_twice():
    delta, base, new = small()
    with pytest.raises(DeltaError, match="it is for a base of"):
        applied(delta, bytes(len(base)), new)
    with pytest.raises(DeltaError, match="it is for a base of"):
        applied(delta, new, new)


def test_a_delta_to_another_result_is_refused():
    delta, base, _ = small()
    with pytest.raises(DeltaError, match=r"it makes .*, wanted is"):
        applied(delta, base, base)


def test_a_base_that_is_not_what_it_is_said_to_be_gives_other_bytes():
    delta, base, new = small()
    other = bytearray(base)
    other[7] ^= 4
    made = memoryview(bytearray(len(base)))
    names = {"base_hash": bytes_hash(memoryview(base)), "new_hash": bytes_hash(memoryview(new))}
    apply(memoryview(delta), base=memoryview(bytes(other)), into=made, **names)
    assert bytes_hash(made) != names["new_hash"], "the puller verifies it"


def test_a_part_that_unpacks_to_gigabytes_takes_no_memory():
    base = bytes(2 * BLOCK)
    bomb = delta_module.zstd.compress(bytes(2**28))
    name, wanted = bytes_hash(memoryview(base)), bytes_hash(memoryview(b"wanted"))
    head = struct.pack("<8sQQ32s32s", b"SRLDELT1", 2, len(base), name, wanted)
    block = struct.pack("<5I", 1, 1, len(bomb), len(bomb), len(bomb)) + 3 * bomb
    into = memoryview(bytearray(len(base)))
    tracemalloc.start()
    try:
        with pytest.raises(DeltaError, match="does not unpack to 1 bytes"):
            apply(
                memoryview(signed(head + block + bytes(32))),
                base=memoryview(base),
                base_hash=name,
                new_hash=wanted,
                into=into,
            )
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_sizes_out_of_bounds_are_refused_before_memory_is_taken():
    base = bytes(2 * BLOCK)
    name = bytes_hash(memoryview(base))
    head = struct.pack("<8sQQ32s32s", b"SRLDELT1", 2, len(base), name, name)
    for sizes in ((BLOCK + 1, BLOCK + 1, 0, 0, 0), (1, 2**32 - 1, 0, 0, 0), (3, 2, 0, 0, 0), (3, 0, 0, 0, 0)):
        block = struct.pack("<5I", *sizes)
        with pytest.raises(DeltaError, match="a block of 64 elements has"):
            apply(
                memoryview(signed(head + block + bytes(32))),
                base=memoryview(base),
                base_hash=name,
                new_hash=name,
                into=memoryview(bytearray(len(base))),
            )


def test_two_hundred_versions_one_after_the_other_with_joins():
    rng = np.random.default_rng(0)
    version = rng.normal(0, 0.02, 3000).astype(np.float32)
    held: dict[int, bytes] = {0: version.tobytes()}  # by the version at which each joined
    for number in range(1, 201):
        base = version.tobytes()
        version = version + rng.normal(0, 1e-4, len(version)).astype(np.float32) * (rng.random(len(version)) < 0.1)
        new = version.astype(np.float32).tobytes()
        delta = encoded(base, new, width=4)
        assert delta is not None
        held = {joined: applied(delta, mine, new) for joined, mine in held.items()}
        if number % 50 == 0:
            held[number] = new  # a late one takes the whole
        version = np.frombuffer(new, dtype=np.float32)
    assert len(held) == 5
    assert set(held.values()) == {version.tobytes()}
