"""Literals by a tokenizer: which strings of a text are marked, and the tokens of a marked text (`streamrl/proto/literals.py`).

A control string is the text of an added token of the tokenizer, special or not, that is more than white space and more than one
character. Texts are marked before a template is rendered with them. A marked string has the tokens that it would have if the tokenizer
had no such added token.

Invariants: a text that has neither control strings nor marks is not changed. No token of a control string comes from a marked one.
"""

import functools
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from streamrl.proto.literals import MARK, MARKS, unmarked
from streamrl_workers.answer_marks import CONTENT_MARKS

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""White space, as SentencePiece's vocabularies have it."""


class Literals:
    """Marks texts and tokenizes marked ones."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        control = {number: token for number, token in self._added.items() if _is_control(token.content)}
        self._control_ids = frozenset(control)
        self._all = _beginnings(token.content for token in control.values())
        self._never_said = _beginnings(
            token.content for token in control.values() if token.special and token.content not in CONTENT_MARKS
        )

    def of_people(self, value: Any) -> Any:  # noqa: ANN401 - JSON
        """Mark all control strings in a text, or in the texts of an object."""
        return _marked(value, self._all)

    def of_model(self, value: Any) -> Any:  # noqa: ANN401 - JSON
        """Mark the special tokens that no message of a model has; it has other control strings where the model wrote those tokens (`<think>`)."""
        return _marked(value, self._never_said)

    def tokens(self, text: str) -> tuple[int, ...]:
        """Tokenize a text that may have marks, without adding special tokens."""
        return tuple(self._tokens(text))

    def _tokens(self, text: str) -> Iterator[int]:
        """Yield tokens as the tokenizer does: added tokens are found in the text, then in what is normalized; pieces between them go to the model."""
        first = True
        for chunk, outer in self._raw.parts(text):
            for piece, inner in self._normalized.parts(self._normalize(chunk)):
                yield from self._piece(piece, first=first)
                first = first and not piece and inner is None
                yield from () if inner is None else (inner,)
            first = False
            yield from () if outer is None else (outer,)

    def _normalize(self, text: str) -> str:
        normalizer = self._tokenizer.normalizer
        return text if normalizer is None or not text else str(normalizer.normalize_str(text))

    def _piece(self, text: str, *, first: bool) -> list[int]:
        ids = self._bare_ids(unmarked(text), first=first)
        if MARK not in text or self._control_ids.isdisjoint(ids):
            return ids
        # The model's own vocabulary has the control string, too: its two parts apart.
        return self._bare_ids(MARKS.sub(lambda found: found[1] or self._border, text), first=first)

    def _bare_ids(self, text: str, *, first: bool) -> list[int]:
        """`first`: the text begins the sequence, where some tokenizers put a space."""
        if not text:
            return []
        ids = self._bare.encode(text if first else self._border + text, add_special_tokens=False).ids
        border = self._bare.token_to_id(self._border)
        return [number for number in ids if number != border]

    @functools.cached_property
    def _border(self) -> str:
        """An added token of `_bare`, which no text has."""
        return secrets.token_hex(16)

    @functools.cached_property
    def _bare(self) -> "Tokenizer":
        """The tokenizer without added tokens, of texts that are normalized."""
        from tokenizers import AddedToken, Tokenizer

        made = Tokenizer(self._tokenizer.model)
        if self._tokenizer.pre_tokenizer is not None:
            made.pre_tokenizer = self._tokenizer.pre_tokenizer
        made.add_tokens([AddedToken(self._border, normalized=False)])
        return made

    @functools.cached_property
    def _raw(self) -> "_Splitter":
        return _Splitter({number: token for number, token in self._added.items() if not token.normalized})

    @functools.cached_property
    def _normalized(self) -> "_Splitter":
        tokens = {number: token for number, token in self._added.items() if token.normalized}
        return _Splitter(tokens, normalize=self._normalize)


class _Splitter:
    """Finds added tokens in texts."""

    def __init__(self, tokens: Mapping[int, "AddedToken"], *, normalize: Callable[[str], str] = str) -> None:
        """`normalize`: what the texts have been through, and the tokens' strings have not."""
        from tokenizers import AddedToken, Tokenizer, models

        self._finder = Tokenizer(models.WordLevel({MARK: 0}, unk_token=MARK))
        renamed = {
            number: AddedToken(
                normalize(token.content),
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=False,
            )
            for number, token in sorted(tokens.items())
        }
        self._finder.add_tokens(list(renamed.values()))  # at once: each call builds the whole search again
        self._ids = {self._finder.token_to_id(token.content): number for number, token in renamed.items()}

    def parts(self, text: str) -> Iterator[tuple[str, int | None]]:
        """(text before an added token, its id), and what is left with None."""
        begin, found = 0, self._finder.encode(text, add_special_tokens=False)
        for number, (start, end) in zip(found.ids, found.offsets, strict=True):
            if number in self._ids:
                yield text[begin:start], self._ids[number]
                begin = end
        yield text[begin:], None


def _is_control(content: str) -> bool:
    return len(content) > 1 and bool(content.replace(_SPACE, " ").strip())


def _beginnings(strings: Iterable[str]) -> "re.Pattern[str]":
    """First characters of these strings, and marks."""
    return re.compile(f"{MARK}|(?={_any_of(strings)}).", re.DOTALL)


def _any_of(strings: Iterable[str]) -> str:
    """Regular expression of these strings in which no two branches begin alike: a tokenizer may have thousands."""
    by_first: dict[str, list[str]] = {}
    for string in filter(None, strings):
        by_first.setdefault(string[0], []).append(string[1:])
    branches = []
    for first, rests in by_first.items():
        shared = commonprefix(rests)  # noqa: RUF071 - strings, no paths
        tails = [rest[len(shared) :] for rest in rests]
        branches.append(re.escape(first + shared) + ("" if "" in tails else _any_of(tails)))
    return f"(?:{'|'.join(branches)})" if branches else "(?!)"


def _marked(value: Any, pattern: "re.Pattern[str]") -> Any:  # noqa: ANN401 - JSON
    match value:
        case str():
            return pattern.sub(rf"\g<0>{MARK}", value)
        case Mapping():
            return {_marked(key, pattern): _marked(item, pattern) for key, item in value.items()}
        case list() | tuple():
            return [_marked(item, pattern) for item in value]
    return value
