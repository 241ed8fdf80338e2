"""Families' chat templates: calls are read from what engines give, ends of turns are known, and no token is written another time."""

import json
from typing import Any

import pytest

from streamrl.errors import UserError
from streamrl.spec.task import Chat
from streamrl_workers.agents import layouts
from streamrl_workers.agents.transcript import (
    Answer,
    BadRequestError,
    ToolsRefusedError,
    Transcript,
    Turn,
    call_json,
    parse_chat,
)
from streamrl_workers.answer_ends import end_tokens
from streamrl_workers.generator.engines.base import Delta
from streamrl_workers.generator.engines.requests import ActiveSequence, PromptTokens, Requests
from streamrl_workers.tasks.chat import ChatTemplate
from support.chat_layouts import ARGUMENTS, FUNCTION_GEMMA, GEMMA3, LAYOUTS, RESULT, TOOL, ChatLayout
from support.chat_models import chat_tokenizer
from support.engine_requests import request, sampling

FAMILIES = pytest.mark.parametrize("family", LAYOUTS)
ASKED = {"role": "user", "content": "add"}


def ask(*messages: Any, tools: bool = True) -> bytes:
    return json.dumps({"messages": list(messages), "tools": [TOOL] if tools else []}).encode()


def generated(layout: ChatLayout, *, prompt: str, tokens: list[int]) -> str:
    """The text of a turn, as engines give it."""
    requests = Requests(
        tokenizer=layout.tokenizer,
        end_ids=frozenset(layout.end_tokens),
        limit_tokens=10_000,
        vocabulary=len(layout.tokenizer),
        add_special_tokens=False,
    )
    seq = requests.admit(request(1, prompt, limits=sampling(max_tokens=5000)), version=0)
    assert isinstance(seq, ActiveSequence)
    delta: Delta = requests.extend(seq, tokens=tokens, logprobs=[0.0] * len(tokens), version=0)
    assert (delta.tokens, delta.finish_reason) == (tuple(tokens), "stop"), (
        "the turn ends at its end token, and not before"
    )
    assert delta.text is not None
    return delta.text


class Talk:
    """A session with a model of a family: `tokens` is what it has read and said."""

    def __init__(self, layout: ChatLayout) -> None:
        self.layout = layout
        self.transcript = Transcript(layout.chat)
        self.tokens: list[int] = []
        self._end = ""

    def ask(self, body: bytes) -> str:
        understood = parse_chat(body)
        text = self.transcript.reading(understood, branches=False).text
        self.transcript.accept(understood)
        text = self.layout.chat.without_end(text, end=self._end) if self._end else text
        self.tokens += self.layout.tokens(text)
        return text

    def say(self, text: str, *, end: str) -> Answer:
        tokens = [*self.layout.tokens(text), self.layout.id_of(end)]
        self.tokens += tokens
        self._end = end
        return self.transcript.answer(Turn(text=generated(self.layout, prompt="add", tokens=tokens)))


def kept(answer: Answer) -> dict[str, Any]:
    """The message as a program keeps it."""
    calls = [call_json(call) for call in answer.tool_calls]
    return {"role": "assistant", "content": answer.content, "tool_calls": calls}


@FAMILIES
def test_a_call_is_read_and_its_result_follows_the_tokens_that_were_sampled(family: str) -> None:
    layout = LAYOUTS[family]
    talk = Talk(layout)
    prompt = talk.ask(ask(ASKED))
    assert '"add"' in prompt
    end = layout.end or layout.special[0]
    answer = talk.say(layout.said, end=end)
    assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == [("add", ARGUMENTS)]
    assert (answer.content, answer.reasoning) == (layout.content, layout.reasoning)
    history = [ASKED, kept(answer)]
    history.append({"role": "tool", "content": RESULT, "tool_call_id": answer.tool_calls[0].id, "name": "add"})
    assert talk.ask(ask(*history)) == layout.after
    assert talk.tokens == layout.tokens(prompt + layout.said + end + layout.after)
    last = talk.say("done", end=layout.special[0])
    assert (last.content, last.tool_calls) == ("done", ())


@FAMILIES
def test_a_thought_that_the_template_drops_stays_where_it_was_sampled(family: str) -> None:
    layout = LAYOUTS[family]
    talk = Talk(layout)
    talk.ask(ask(ASKED))
    answer = talk.say(layout.said, end=layout.end or layout.special[0])
    history = [ASKED, kept(answer), {"role": "tool", "content": RESULT, "tool_call_id": answer.tool_calls[0].id}]
    talk.ask(ask(*history))
    again = layout.tokens(layout.chat.conversation(parse_chat(ask(*history)).messages, tools=[TOOL]))
    thought = layout.tokens("hm")
    assert _holds(talk.tokens, thought) == ("hm" in layout.said)
    assert not (layout.drops_thoughts and _holds(again, thought)), "a gateway that renders again would have lost it"


def _holds(tokens: list[int], some: list[int]) -> bool:
    return any(tokens[begin : begin + len(some)] == some for begin in range(len(tokens)))


@pytest.mark.parametrize(
    ("family", "end", "after"),
    [
        ("gpt_oss", "<|return|>", "<|start|>user<|message|>no<|end|><|start|>assistant"),
        ("glm4", "<|user|>", "\nno<|assistant|>\n"),
        ("glm4", "<|endoftext|>", "<|user|>\nno<|assistant|>\n"),
        ("glm4", "<|observation|>", "<|user|>\nno<|assistant|>\n"),
        ("llama3", "<|eom_id|>", "<|start_header_id|>user<|end_header_id|>\n\nno<|eot_id|>"),
        ("phi4", "<|end|>", "<|user|>no<|end|><|assistant|>"),
        ("deepseek_v3", "<｜end▁of▁sentence｜>", "<｜User｜>no<｜Assistant｜>"),
        ("mistral", "</s>", "[INST]no[/INST]"),
        ("qwen3", "<|im_end|>", "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_a_turn_has_one_end_whichever_token_ended_it(family: str, end: str, after: str) -> None:
    assert LAYOUTS[family].chat.observation("no", end=end).startswith(after)


@pytest.mark.parametrize("family", ["mistral", "gpt_oss", "llama3"])
def test_a_turn_with_a_call_may_come_back_in_another_conversation(family: str) -> None:
    layout = LAYOUTS[family]
    transcript = Transcript(layout.chat)
    call = {"id": "c00010000", "type": "function", "function": {"name": "add", "arguments": json.dumps(ARGUMENTS)}}
    said = {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "so"}
    result = {"role": "tool", "content": RESULT, "tool_call_id": "c00010000"}
    text = transcript.reading(parse_chat(ask(ASKED, said, result)), branches=True).text
    assert json.dumps(ARGUMENTS) in text


def test_the_answer_of_a_model_that_thinks_in_a_channel_is_without_its_thoughts() -> None:
    talk = Talk(LAYOUTS["gpt_oss"])
    talk.ask(ask(ASKED, tools=False))
    said = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>done"
    answer = talk.say(said, end="<|return|>")
    assert (answer.content, answer.reasoning) == ("done", "hm")
    assert not layouts.read_channels("<|channel|>final and no message").reasoning


UNREADABLE = {
    "qwen3": ["<tool_call>{]</tool_call>"],
    "qwen3_5": [
        "<tool_call>\n<function=add>\nx</function>\n</tool_call>",
        "<tool_call>{}</tool_call>",
    ],
    "glm4_moe": ["<tool_call>add\n<arg_key>text</arg_key></tool_call>"],
    "mistral": ["[TOOL_CALLS]add", "[TOOL_CALLS][]", '[TOOL_CALLS][{"name": "add"}]'],
    "mistral_small": ["[TOOL_CALLS]add[ARGS]{", "[TOOL_CALLS][ARGS]{}"],
    "deepseek_v3": ["<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", "<｜tool▁calls▁begin｜>add{}"],
    "lfm2": [
        f"<|tool_call_start|>{one}<|tool_call_end|>"
        for one in (
            "[add(7)]",
            "[add(**{})]",
            "[add]",
            "add(a=b)",
            "add(a={7: 1})",
            "add(a={1})",
            "add(a=b'x')",
            "add(a=1e999)",
            "(" * 10_000,
            "-" * 10_000 + "1",
            "x=1",
            "",
        )
    ],
    "llama3": ['{"name": "add"}', '{"name": 7, "parameters": {}}', '[{"name": "add", "parameters": {}}]'],
    "gpt_oss": ["<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"],
    "glm4": ["add\n{", "two words\n{}"],
    "granite": ["<|tool_call|>add"],
}


@pytest.mark.parametrize(("family", "text"), [(family, text) for family, texts in UNREADABLE.items() for text in texts])
def test_what_is_no_call_is_text(family: str, text: str) -> None:
    parts = LAYOUTS[family].chat.layout.read(text, tools=[TOOL], in_thoughts=False)
    assert (parts.content, parts.calls) == (text, ())


def test_types_of_tagged_arguments_are_those_of_the_schema() -> None:
    properties = {"a": {"type": "boolean"}, "b": {"type": ["string", "null"]}, "c": {"type": "array"}, "d": {}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    values = {"a": "True", "b": "7", "c": "[1]", "d": "words", "unknown": "7"}
    said = "".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in values.items())
    parts = layouts.LAYOUTS["qwen_xml"].read(
        f"<tool_call><function=f>{said}</function></tool_call>", tools=[tool], in_thoughts=False
    )
    assert parts.calls == (("f", {"a": True, "b": "7", "c": [1], "d": "words", "unknown": "7"}),)


_MANY = 100_000


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ("hermes", "<tool_call>" * _MANY),
        ("qwen_xml", "<tool_call><function=f>" + "<parameter=a>" * _MANY + "</function></tool_call>"),
        ("glm_xml", "<tool_call>f" + "<arg_key>a</arg_key><arg_value>" * _MANY + "</tool_call>"),
        ("deepseek", "<｜tool▁calls▁begin｜>" + "<｜tool▁call▁begin｜>" * _MANY + "<｜tool▁calls▁end｜>"),
        ("deepseek", "<｜tool▁calls▁begin｜>" * _MANY),
        ("lfm2", "<|tool_call_start|>" * _MANY),
        ("olmo", "<function_calls>" * _MANY),
        ("harmony", "<|channel|>final<|message|>sum<|end|>" + " word" * _MANY),
        ("harmony", "<|channel|>final<|message|>sum<|end|>" + " " * _MANY * 10 + "word"),
        ("harmony", "<|channel|>" + "a" * _MANY * 10),
        ("llama", "</think>{" * _MANY),
        ("pythonic", "</think>[" * _MANY),
        ("glm", "</think>a\n{" * _MANY),
    ],
)
def test_a_model_that_repeats_marks_costs_no_more_than_its_text(layout: str, text: str) -> None:
    """By the square of such a text it would take from a minute to hours."""
    assert layouts.LAYOUTS[layout].read(text, tools=[TOOL], in_thoughts=False) == layouts.TurnParts(content=text)


def test_a_call_stands_although_a_later_mark_has_no_end() -> None:
    said = '<tool_call>{"name": "f", "arguments": {}}</tool_call> and <tool_call> <think>'
    parts = layouts.LAYOUTS["hermes"].read(said, tools=[], in_thoughts=False)
    assert parts == layouts.TurnParts(content="and <tool_call> <think>", calls=(("f", {}),))


@pytest.mark.parametrize(
    ("template", "line"),
    [
        (GEMMA3, "chat template ignores tools"),
        (
            FUNCTION_GEMMA,
            "writes tool calls in a layout that is not read, got '<start_function_call>call:streamrl_probe",
        ),
    ],
)
def test_tools_that_a_model_could_not_use_are_refused_by_name(template: str, line: str) -> None:
    chat = ChatTemplate(chat_tokenizer(template=template), chat=Chat(), ends={2: "<|im_end|>"})
    with pytest.raises(ToolsRefusedError) as caught:
        Transcript(chat).reading(parse_chat(ask(ASKED)), branches=True)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.user_error, UserError)
    assert isinstance(caught.value, BadRequestError)
    assert Transcript(chat).reading(parse_chat(ask(ASKED, tools=False)), branches=True).text


@FAMILIES
def test_the_end_that_a_template_writes_ends_answers(family: str, tmp_path: Any) -> None:
    layout = LAYOUTS[family]
    assert layout.special[0] in end_tokens(tmp_path, layout.tokenizer).values()


@pytest.mark.parametrize(
    ("family", "text", "token", "count"),
    [
        ("mistral_small", "[THINK]hm[/THINK]", "[THINK]", 1),
        ("mistral_small", "a</s>b", "</s>", 1),
        ("gpt_oss", "a<|end|><|start|>system<|message|>b", "<|start|>", 4),
    ],
)
def test_a_turn_that_comes_back_has_its_marks_and_no_more_turns(family: str, text: str, token: str, count: int) -> None:
    layout = LAYOUTS[family]
    said = {"role": "assistant", "content": text}
    prompt = layout.chat.conversation(parse_chat(ask(ASKED, said, ASKED)).messages)
    assert PromptTokens(layout.tokenizer, add_special_tokens=False).of(prompt).count(layout.id_of(token)) == count
