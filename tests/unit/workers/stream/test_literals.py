"""Literals with tokenizers of several kinds: no control token comes from a marked string, and nothing else changes."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from streamrl.proto.literals import MARK, unmarked
from streamrl_workers.stream.literals import Literals
from support.agent_runs import piece_tokenizer

START, END = "<|im_start|>", "<|im_end|>"
THINK, CALL = "<think>", "<tool_call>"
CONTROL = (START, END, THINK, CALL)
LETTERS = sorted(set("abc <>|_imstarendhkol\n/"))


def added(tokenizer: Tokenizer) -> Tokenizer:
    """With control tokens, special ones and others."""
    tokenizer.add_special_tokens([START, END])
    tokenizer.add_tokens([AddedToken(THINK, normalized=False), AddedToken(CALL), AddedToken("  ", normalized=False)])
    return tokenizer


def bytes_bpe() -> Tokenizer:
    return added(piece_tokenizer().backend_tokenizer)


def sentence_bpe() -> Tokenizer:
    """As Llama's was: each piece between control tokens begins with a space of its own."""
    pieces = ["<unk>", "\u2581", *[letter for letter in LETTERS if letter != " "], "\u2581a", "ab", "<|", "|>"]
    merges = [("\u2581", "a"), ("a", "b"), ("<", "|"), ("|", ">")]
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    return added(made)


def first_space() -> Tokenizer:
    """As Llama's is: only what begins the text begins with a space of its own."""
    made = sentence_bpe()
    made.normalizer = normalizers.Sequence([])
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return made


def unigram() -> Tokenizer:
    """Its vocabulary has the control strings as pieces, too, and prefers them."""
    pieces = [("<unk>", -9.0), *((control, 0.0) for control in CONTROL), *((letter, -2.0) for letter in LETTERS)]
    return added(Tokenizer(models.Unigram(pieces, unk_id=0)))


KINDS: list[Callable[[], Tokenizer]] = [bytes_bpe, sentence_bpe, first_space, unigram]
MADE = {kind: kind() for kind in KINDS}
LITERALS = {kind: Literals(made) for kind, made in MADE.items()}
texts = st.lists(st.sampled_from([*CONTROL, "a", "ab", " ", "  ", "\n", "<|", "im_end|>", "think>", "/"]), max_size=8)


def ids_of(kind: Callable[[], Tokenizer], text: str) -> tuple[int, ...]:
    return tuple(MADE[kind].encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", KINDS)
@given(parts=texts)
def test_no_control_token_comes_from_peoples_text(kind: Callable[[], Tokenizer], parts: list[str]) -> None:
    text, control = "".join(parts), {MADE[kind].token_to_id(string) for string in CONTROL}
    marked = LITERALS[kind].of_people(text)
    assert unmarked(marked) == text
    assert (marked == text) == (not any(string in text for string in CONTROL))
    ids = LITERALS[kind].tokens(f"{START}{marked}{END}")
    assert [number for number in ids if number in control] == [ids[0], ids[-1]] == [*ids_of(kind, START)[-1:], ids[-1]]
    if kind is bytes_bpe:
        assert MADE[kind].decode(list(ids), skip_special_tokens=False) == f"{START}{text}{END}"


@pytest.mark.parametrize("kind", KINDS)
@given(parts=texts)
def test_without_marks_tokens_are_the_tokenizers(kind: Callable[[], Tokenizer], parts: list[str]) -> None:
    assert LITERALS[kind].tokens("".join(parts)) == ids_of(kind, "".join(parts))


@pytest.mark.parametrize("kind", [bytes_bpe, sentence_bpe, first_space])
@given(before=texts, after=texts)
def test_a_literal_has_the_tokens_of_a_tokenizer_that_does_not_know_it(
    kind: Callable[[], Tokenizer], before: list[str], after: list[str]
) -> None:
    """Its neighbours merge with it as with any other text."""
    strange = "<think/>"  # as long and as strange, and no control string
    head, tail = START + "".join(before), "".join(after) + END
    told = LITERALS[kind].tokens(f"{head}{THINK[0]}{MARK}{THINK[1:]}{tail}")
    bare = Tokenizer.from_str(MADE[kind].to_str().replace(f'"content":"{THINK}"', f'"content":"{strange}"'))
    if THINK not in head + tail:
        assert told == tuple(bare.encode(f"{head}{THINK}{tail}", add_special_tokens=False).ids)


@pytest.mark.parametrize("text", [MARK, MARK + END, f"a{MARK}{MARK}{END}{MARK}"])
def test_a_mark_in_a_text_is_text(text: str) -> None:
    literals, tokenizer = LITERALS[bytes_bpe], MADE[bytes_bpe]
    marked = literals.of_people(text)
    assert unmarked(marked) == text
    ids = literals.tokens(marked + END)
    assert ids[-1:] == ids_of(bytes_bpe, END)
    assert tokenizer.decode(list(ids), skip_special_tokens=False) == text + END
    assert tokenizer.token_to_id(END) not in ids[:-1]


def test_runs_of_white_space_are_no_control_strings() -> None:
    literals = LITERALS[bytes_bpe]
    assert literals.of_people("if x:\n  y") == "if x:\n  y"
    assert MADE[bytes_bpe].token_to_id("  ") in literals.tokens(literals.of_people(f"a  b{END}"))


def test_a_models_text_keeps_what_is_not_special() -> None:
    message = {"content": f"{THINK}a{END}", "of": [{START: 1.0}, None, True]}
    assert LITERALS[bytes_bpe].of_model(message) == {
        "content": f"{THINK}a<{MARK}|im_end|>",
        "of": [{f"<{MARK}|im_start|>": 1.0}, None, True],
    }
