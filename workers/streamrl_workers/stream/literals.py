"""Literals by a tokenizer: which strings of a text are marked, and the tokens of a marked text (`streamrl/literals.py`).

A control string is the text of an added token of the tokenizer, special or not, that is more than white space. Texts are marked before
a template is rendered with them. A marked string has the tokens that it would have if the tokenizer had no such added token.

Invariant: a text that has no control string has no mark, unless it has the mark itself.
"""

import functools
import re
import secrets
from collections.abc import Iterable, Mapping
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from streamrl.literals import MARK

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_ESCAPED_MARK = r"\ufdd0"
"""The mark as templates write it that print an object by `repr`, or as ASCII JSON."""
_WHITE_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""A space, as SentencePiece's vocabularies have it."""


class Literals:
    """Marks texts and tokenizes marked ones, by one tokenizer."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self._added = {number: token for number, token in added.items() if _is_control(token)}
        self._white_space = {number: token for number, token in added.items() if number not in self._added}
        self._control = control = _longest_of(token.content for token in self._added.values())
        special = _longest_of(token.content for token in self._added.values() if token.special)
        self._all = re.compile(f"{MARK}|{control}")
        self._special = re.compile(f"{MARK}|{special}")

    def of_people(self, value: Any) -> Any:  # noqa: ANN401 - JSON
        """Mark all control strings in a text, or in the texts of an object."""
        return _marked(value, self._all)

    def of_model(self, value: Any) -> Any:  # noqa: ANN401 - JSON
        """Mark special tokens alone: text of a model has none, but has other control strings where it wrote those tokens (`<think>`)."""
        return _marked(value, self._special)

    def rendered(self, text: str) -> str:
        """What a template made of marked texts, with marks that it wrote as escapes restored."""
        escaped = re.escape(_ESCAPED_MARK)
        return re.sub(f"{escaped}(?={MARK}|{self._control})", MARK, text) if _ESCAPED_MARK in text else text

    def tokens(self, text: str) -> tuple[int, ...]:
        """Tokenize a marked text, without adding special tokens."""
        ids = self._stand_ins
        written = self._control_or_marked.sub(self._written, text)
        encoded = self._literal_tokenizer.encode(written, add_special_tokens=False).ids
        return tuple(ids.get(number, number) for number in encoded if number != self._joint_id)

    def _written(self, found: "re.Match[str]") -> str:
        if not found[0].startswith(MARK):
            return self._prefix + found[0]
        literal = found[0][1:]
        ids = self._literal_tokenizer.encode(literal, add_special_tokens=False).ids
        if self._tokenizer.token_to_id(literal) in ids:  # the vocabulary has it as a piece, too
            return literal[:1] + self._joint + literal[1:]
        return literal

    @functools.cached_property
    def _control_or_marked(self) -> "re.Pattern[str]":
        return re.compile(f"{MARK}?{self._control}|{MARK}.?", re.DOTALL)

    @functools.cached_property
    def _literal_tokenizer(self) -> "Tokenizer":
        """The same tokenizer, but what makes a control token is its string behind a prefix that no text has."""
        from tokenizers import AddedToken, Tokenizer

        made = Tokenizer(self._tokenizer.model)
        if self._tokenizer.normalizer is not None:
            made.normalizer = self._tokenizer.normalizer
        if self._tokenizer.pre_tokenizer is not None:
            made.pre_tokenizer = self._tokenizer.pre_tokenizer
        renamed = [_renamed(token, self._prefix + token.content) for token in self._added.values()]
        made.add_tokens([*renamed, *self._white_space.values(), AddedToken(self._joint, normalized=False)])
        return made

    @functools.cached_property
    def _stand_ins(self) -> dict[int, int]:
        """Ids of the literal tokenizer -> those of the tokenizer."""
        of = self._literal_tokenizer.token_to_id
        found = {of(self._prefix + token.content): number for number, token in self._added.items()}
        found |= {of(token.content): number for number, token in self._white_space.items()}
        return {number: own for number, own in found.items() if number is not None}

    @functools.cached_property
    def _joint_id(self) -> int | None:
        return self._literal_tokenizer.token_to_id(self._joint)

    @functools.cached_property
    def _prefix(self) -> str:
        return secrets.token_hex(16)

    @functools.cached_property
    def _joint(self) -> str:
        return secrets.token_hex(16)


def _is_control(token: "AddedToken") -> bool:
    return bool(token.content.replace(_WHITE_SPACE, " ").strip())


def _renamed(token: "AddedToken", content: str) -> "AddedToken":
    from tokenizers import AddedToken

    return AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def _longest_of(strings: Iterable[str]) -> str:
    """Regular expression of the longest of these strings at a place; no two branches begin alike, as a tokenizer may have thousands."""
    by_first: dict[str, list[str]] = {}
    for string in filter(None, strings):
        by_first.setdefault(string[0], []).append(string[1:])
    branches = []
    for first, rests in by_first.items():
        shared = commonprefix(rests)  # noqa: RUF071 - strings, no paths
        tails = {rest[len(shared) :] for rest in rests}
        more = _longest_of(tails) + ("?" if "" in tails else "") if tails != {""} else ""
        branches.append(re.escape(first + shared) + more)
    return f"(?:{'|'.join(branches)})" if branches else "(?!)"


def _marked(value: Any, pattern: "re.Pattern[str]") -> Any:  # noqa: ANN401 - JSON
    match value:
        case str():
            return pattern.sub(rf"{MARK}\g<0>", value)
        case Mapping():
            return {_marked(key, pattern): _marked(item, pattern) for key, item in value.items()}
        case list() | tuple():
            return [_marked(item, pattern) for item in value]
    return value
