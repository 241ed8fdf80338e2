"""Where an answer ends: one answer for all who ask."""

import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import UserError
from streamrl.spec.task import Chat
from streamrl_workers.answer_ends import end_tokens, template_end, written_end
from streamrl_workers.tasks.chat import open_chat
from support.speaking_models import CHATML, END, OTHER_END, START, WORDS, speaking_tokenizer
from support.tree import python

ENDS = {0: OTHER_END, 2: END}
PLAIN = "{% for m in messages %}{{ m.content + '\\n' }}{% endfor %}"
SPACED = "{% for m in messages %}{{ m.content + '\\n<|im_end|>' }}{% endfor %}"
ENDS_LAST = (
    "{% for m in messages %}{{ m.content }}{% if loop.last %}<|im_end|>{% else %}<|im_start|>{% endif %}{% endfor %}"
)


def ids(*words: str) -> tuple[int, ...]:
    return tuple(WORDS.index(word) for word in words)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("named", [2, [0, 2], [2, 10**9, None, "<|im_end|>"]])
def test_configurations_add_to_the_tokenizers_end(file: str, named: Any, tmp_path: Path) -> None:
    (tmp_path / file).write_text(json.dumps({"eos_token_id": named}))
    assert end_tokens(tmp_path, speaking_tokenizer()) == ENDS


def test_the_text_part_of_a_configuration_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [2]}}))
    assert end_tokens(tmp_path, speaking_tokenizer()) == ENDS


def test_without_configurations_there_is_the_tokenizers_end(tmp_path: Path) -> None:
    assert end_tokens(tmp_path, speaking_tokenizer()) == {0: OTHER_END}


def test_a_broken_configuration_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"^\S*generation_config\.json: is not JSON: [^\n]*$"):
        end_tokens(tmp_path, speaking_tokenizer())


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (None, ()),
        (CHATML, ids(END)),  # the line break after it is glue
        (PLAIN, ()),
        (SPACED, ids("\n", END)),
        (ENDS_LAST, ids(END)),  # of the last turn: others may end otherwise
        ("{{ raise_exception('never') }}", ()),
        ("{% for", ()),
        ("always the same<|im_end|>", ()),
    ],
)
def test_the_end_of_turn_is_what_the_template_writes_after_an_answer(
    template: str | None, end: tuple[int, ...], tmp_path: Path
) -> None:
    tokenizer = speaking_tokenizer(template=template)
    assert template_end(tokenizer) == end
    assert written_end(tokenizer, chat=True) == (end or (0,))
    assert written_end(tokenizer, chat=False) == (0,)
    assert end_tokens(tmp_path, tokenizer) == {0: OTHER_END} | {number: WORDS[number] for number in end[-1:]}


@pytest.mark.parametrize("template", [CHATML, SPACED])
def test_turns_of_a_conversation_end_as_answers_do(template: str, tmp_path: Path) -> None:
    speaking_tokenizer(template=template).save_pretrained(tmp_path)
    chat = open_chat(Chat(), model_path=str(tmp_path))
    assert [number for number in range(len(WORDS)) if number in chat.ends] == [0, 2]
    assert END not in chat.observation("!", end=END).partition("!")[0]
    assert START not in (chat.observation("!", end="").partition(END)[0])


def test_it_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, streamrl_workers.answer_ends; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert python(code).split() == ["False", "False"]
