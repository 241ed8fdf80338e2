"""The texts of the repository, for tests about them: their sentences, links, anchors, commands and blocks of YAML."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

from support.tree import ROOT

_FENCE = re.compile(r"^ *```(\w*)")
_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")
_SPAN = re.compile(r"(`+)(.+?)\1", re.DOTALL)
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_END = re.compile(r"(?<!e\.g\.)(?<!i\.e\.)(?<!Alg\.)(?<!Fig\.)(?<=[.!?])[\"”)*_]*\s+(?=[\"“(*_]*[A-Z0-9])")
_WORD = re.compile(r"\w")
_SHELLS = ("console", "sh", "bash", "shell")
_PUNCTUATION = set("|&;")
MIN_WORDS = 3
"""What has fewer is a label, not a sentence."""


@dataclass(frozen=True, kw_only=True)
class Fence:
    """A block of code."""

    language: str
    line: int  # of its first line, from 1
    text: str


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        """Its path from the root."""
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        """All of it."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def fences(self) -> list[Fence]:
        """Blocks of code, without the columns before them."""
        found: list[Fence] = []
        block: list[str] | None = None
        start, language = 0, ""
        for number, line in enumerate(self.text.splitlines(), start=1):
            if block is None and (opened := _FENCE.match(line)):
                block, start, language = [], number + 1, opened[1]
            elif block is not None and line.strip() == "```":
                width = min((len(row) - len(row.lstrip()) for row in block if row.strip()), default=0)
                found.append(Fence(language=language, line=start, text="\n".join(row[width:] for row in block)))
                block = None
            elif block is not None:
                block.append(line)
        assert block is None, f"{self.name}:{start}: a block of code has no end"
        return found

    @cached_property
    def lines(self) -> list[str]:
        """Lines outside of blocks of code; those within are empty."""
        lines, inside = [], False
        for line in self.text.splitlines():
            if _FENCE.match(line):
                inside = not inside
                lines.append("")
            else:
                lines.append("" if inside else line)
        return lines

    @cached_property
    def anchors(self) -> set[str]:
        """What a link may name behind `#`, as forges make it from headings."""
        seen: Counter[str] = Counter()
        found = set()
        for line in self.lines:
            if heading := re.match(r"^#{1,6}\s+(.*?)\s*$", line):
                slug = re.sub(r"[^\w\- ]", "", _plain(heading[1]).lower()).replace(" ", "-")
                found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
                seen[slug] += 1
        return found

    @cached_property
    def links(self) -> list[tuple[int, str]]:
        """(line, target) of links and pictures, code left out."""
        return [
            (number, link[2])
            for number, line in enumerate(self.lines, start=1)
            for link in _LINK.finditer(_SPAN.sub("code", line))
        ]

    @cached_property
    def spans(self) -> list[tuple[int, str]]:
        """(line, text) of code within lines."""
        return [(number, span[2]) for number, line in enumerate(self.lines, start=1) for span in _SPAN.finditer(line)]

    @cached_property
    def sentences(self) -> list[str]:
        """Sentences of the prose: no headings, tables, pictures and blocks of code. An item of a list begins one; a piece of code is one word."""
        return [
            sentence
            for block in self._blocks()
            for sentence in _END.split(_plain(_SPAN.sub("Code", block)))
            if _words(sentence) >= MIN_WORDS
        ]

    def _blocks(self) -> Iterator[str]:
        block: list[str] = []
        for line in [*self.lines, ""]:
            ends = not line.strip() or line.startswith(("#", "|", "![", "<", ">"))
            if block and (ends or _ITEM.match(line)):
                yield " ".join(block)
                block = []
            if not ends and (block or _ITEM.match(line) or not line.startswith("    ")):
                block.append(_ITEM.sub("", line).strip())

    @cached_property
    def lengths(self) -> tuple[int, int]:
        """Words of the median sentence, and of that which nine in ten do not exceed."""
        words = sorted(_words(sentence) for sentence in self.sentences) or [0]
        return words[(len(words) - 1) // 2], words[max(-(-len(words) * 9 // 10) - 1, 0)]

    @cached_property
    def commands(self) -> list[tuple[int, list[str]]]:
        """(line, words) of each command in its blocks of a shell."""
        return [
            (fence.line, words)
            for fence in self.fences
            if fence.language in _SHELLS
            for text in _command_lines(fence)
            for words in _split(text)
        ]


def pages() -> list[Page]:
    """Every text written by people."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "tests/corpus/README.md"]
    return [Page(path) for path in sorted(files) if ROOT / "docs/reference" not in path.parents]


def guides() -> list[Page]:
    """The texts that a reader reads, without the records of decisions."""
    return [page for page in pages() if not page.name.startswith("docs/decisions/")]


def _plain(text: str) -> str:
    """Without marks; of a link its text."""
    return re.sub(r"[*`]|(?<!\w)_|_(?!\w)", "", _LINK.sub(lambda link: link[1], text))


def _words(sentence: str) -> int:
    return sum(1 for word in sentence.split() if _WORD.search(word))


def _command_lines(fence: Fence) -> Iterator[str]:
    """Whole commands, with what continues them; what they print is left out where prompts say which is which."""
    command, document = "", ""
    for line in fence.text.splitlines():
        if document:
            document = "" if line.strip() == document else document
            continue
        is_command = line.startswith("$ ") or fence.language != "console" or command
        if not is_command or not line.strip():
            continue
        command += line.removeprefix("$ ").strip()
        if command.endswith("\\"):
            command = command.removesuffix("\\")
            continue
        if here := re.search(r"<<-?'?(\w+)", command):
            document = here[1]
            command = command[: here.start()]
        yield command
        command = ""


def _split(text: str) -> Iterator[list[str]]:
    """The commands of a line: parts of a pipeline each by itself, without what is set before them and where output goes."""
    while inner := re.search(r"\$\(([^()]*)\)", text):
        yield from _split(inner[1])
        text = text.replace(inner[0], "VALUE", 1)
    if "streamrl " in text:  # [--flag VALUE ...] stands for what may be left out
        text = re.sub(r"\[(--[^\[\]]*?)(?: \.\.\.)?\]", r"\1", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    for is_mark, group in groupby(lexer, key=lambda word: bool(word) and set(word) <= _PUNCTUATION):
        words = list(group)
        if is_mark:
            continue
        while words and re.match(r"^[A-Z_]+=", words[0]):
            words.pop(0)
        if ">" in words:
            words = words[: words.index(">")]
        if words:
            yield [words[0].removeprefix(".venv/bin/"), *words[1:]]
