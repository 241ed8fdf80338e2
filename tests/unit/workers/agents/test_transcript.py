"""What requests say to the model and what its text says to programs: tables, and the property that nothing is lost between them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.spec.task import Chat
from streamrl_workers.agents.layouts import LAYOUTS
from streamrl_workers.agents.transcript import (
    Answer,
    BadRequestError,
    EditedError,
    MessageTemplate,
    PlainTemplate,
    Reading,
    Transcript,
    Turn,
    call_json,
    parse_chat,
    parse_reward,
    parse_text,
)
from streamrl_workers.tasks.chat import ChatTemplate
from support.chat_models import END, TOOL_TEMPLATE, chat_tokenizer

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CHATML = ChatTemplate(chat_tokenizer(template=TOOL_TEMPLATE), chat=Chat(), ends={2: END})


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def chat(*messages: Any, **fields: Any) -> bytes:
    return json.dumps({"messages": list(messages), **fields}).encode()


def said(answer: Answer) -> dict[str, Any]:
    """The message as a program keeps it."""
    calls = [call_json(call) for call in answer.tool_calls]
    return {"role": "assistant", "content": answer.content, **({"tool_calls": calls} if calls else {})}


class Talk:
    """A session: what the model has read and written so far, in the newest context, is `text`."""

    def __init__(self, template: MessageTemplate, **options: Any) -> None:
        self.transcript = Transcript(template, **options)
        self.text = ""

    def ask(self, body: bytes) -> str:
        """What the request adds. Raises `EditedError` where it continues nothing."""
        return self.branch(body, branches=False).text

    def branch(self, body: bytes, *, branches: bool = True) -> Reading:
        """What the request has the model read."""
        ask = parse_chat(body) if b'"messages"' in body else parse_text(body)
        reading = self.transcript.reading(ask, branches=branches)
        self.transcript.accept(ask)
        self.text = reading.text if reading.context else self.text + reading.text
        return reading

    def say(self, text: str, *, reason: str = "stop") -> Answer:
        """The model's turn: no end token stands behind it."""
        self.text += text
        return self.transcript.answer(Turn(text=text, finish_reason=reason))


# ---- requests


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "the body must be JSON"),
        (b"[1]", "must be a JSON object"),
        (b"\xff", "the body must be JSON"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "JSON in UTF-8"),
        (b"[" * 100_000, "the body must be JSON"),
        (b"{}", "messages must be a list"),
        (chat(), "at least one message"),
        (chat("hello"), "messages[0] must be an object with a role"),
        (chat(user("a"), {"role": "god"}), "messages[1] must be an object with a role: system, developer, user"),
        (chat({"role": "user", "content": 7}), "messages[0] is not as OpenAI's API has it, got 7"),
        (chat({"role": "user", "content": [{"type": "audio"}]}), "messages[0].content must be text"),
        (chat(user("a"), n=2), "n is not supported"),
        (chat(user("a"), logprobs=True), "logprobs is not supported"),
        (chat(user("a"), tools="add"), "tools must be a list of objects"),
        (chat({"role": "assistant", "tool_calls": [{}]}), "messages[0].tool_calls must have a function"),
    ],
)
def test_a_request_that_is_not_understood_is_one_line(body: bytes, text: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        parse_chat(body)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "fields", [{"n": 1}, {"n": None}, {"logprobs": False}, {"temperature": 9}, {"tool_choice": "none"}]
)
def test_what_means_nothing_is_nothing(fields: dict[str, Any]) -> None:
    assert parse_chat(chat(user("a"), **fields)).messages == (user("a"),)


@pytest.mark.parametrize("prompt", [7, [1, 2], ["a", "b"], None])
def test_a_text_completion_has_one_text(prompt: Any) -> None:
    with pytest.raises(BadRequestError, match="prompt must be one text"):
        parse_text(json.dumps({"prompt": prompt}).encode())


@pytest.mark.parametrize("reward", ["1", None, True, float("nan"), float("inf"), 10**400, [1]])
def test_a_reward_is_a_finite_number(reward: Any) -> None:
    with pytest.raises(BadRequestError, match="reward must be a finite number"):
        parse_reward(json.dumps({"reward": reward}).encode())
    assert parse_reward(b'{"reward": -0.5}') == -0.5


# ---- continuing


def test_plain_text_is_the_contents() -> None:
    talk = Talk(PlainTemplate())
    assert talk.ask(chat(user("guess\n"))) == "guess\n"
    answer = talk.say("4")
    assert talk.ask(chat(user("guess\n"), said(answer), user("up\n"))) == "up\n"
    with pytest.raises(BadRequestError, match=r"tools need task.chat"):
        Talk(PlainTemplate()).ask(chat(user("a"), tools=[TOOL]))


@pytest.mark.parametrize(
    "same",
    [
        {"role": "assistant", "content": "four"},
        {"role": "assistant", "content": [{"type": "text", "text": "fo"}, {"type": "text", "text": "ur"}]},
        {"role": "assistant", "content": "four", "tool_calls": None, "refusal": None, "annotations": []},
    ],
)
def test_an_answer_may_be_sent_back_in_any_form(same: dict[str, Any]) -> None:
    talk = Talk(CHATML)
    talk.ask(chat(user("2+2")))
    talk.say("four")
    added = talk.ask(chat(user("2+2"), same, user("no")))
    assert added == "<|im_end|>\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"
    assert CHATML.without_end(added, end=END) == added.removeprefix("<|im_end|>")


FOUR = {"role": "assistant", "content": "four"}
EDITS = [
    (chat(user("2+2")), "it has 1 messages, and there have been 2"),
    (chat(user("2+3"), FOUR), "messages[0] is another than before"),
    (chat(user("2+2"), {"role": "assistant", "content": "five"}), "messages[1] is another than before"),
    (chat(user("2+2"), user("four")), "messages[1] is another than before"),
    (chat({"role": "system", "content": "s"}, user("2+2"), FOUR), "messages[0] is another than before"),
    (chat(user("2+2"), FOUR, tools=[TOOL]), "its tools are others"),
    (json.dumps({"prompt": "2+2"}).encode(), "it went from chat completions to text completions"),
]


@pytest.mark.parametrize(("body", "text"), EDITS)
def test_an_edited_history_is_no_continuation(body: bytes, text: str) -> None:
    talk = Talk(CHATML)
    talk.ask(chat(user("2+2")))
    talk.say("four")
    with pytest.raises(EditedError) as caught:
        talk.ask(body)
    assert text in str(caught.value)
    assert talk.ask(chat(user("2+2"), FOUR, user("x"))), "nothing has changed"


@pytest.mark.parametrize(("body", "text"), EDITS)
def test_an_edited_history_is_read_as_one_that_begins(body: bytes, text: str) -> None:
    del text
    talk = Talk(CHATML)
    first = chat(user("2+2"))
    talk.ask(first)
    talk.say("four")
    assert talk.branch(body) == Reading(text=Talk(CHATML).ask(body), context=True)
    answer = talk.say("five")
    back = talk.branch(chat(user("2+2"), FOUR, user("x")))
    assert back.context, "of what was before the newest context nothing goes on"
    assert "five" not in back.text
    assert answer.number == 2


def test_a_context_goes_on_as_the_first_did() -> None:
    talk = Talk(CHATML)
    talk.ask(chat(user("2+2")))
    talk.say("four")
    begun = [user("of four"), user("and five")]
    talk.branch(chat(*begun, tools=[TOOL]))
    answer = talk.say(CALL)
    assert answer.tool_calls, "its tools are its own"
    added = talk.ask(chat(*begun, said(answer), user("no"), tools=[TOOL]))
    assert added == "<|im_end|>\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"


def test_a_refused_context_changes_nothing() -> None:
    talk = Talk(PlainTemplate())
    talk.ask(chat(user("a")))
    talk.say("b")
    with pytest.raises(BadRequestError, match=r"tools need task.chat"):
        talk.branch(chat(user("c"), tools=[TOOL]))
    assert not talk.branch(chat(user("a"), {"role": "assistant", "content": "b"}, user("c"))).context


def test_a_text_goes_on_behind_the_answer_and_its_stop_string() -> None:
    talk = Talk(PlainTemplate(), stops=["\n", ";"])
    talk.ask(b'{"prompt": "a "}')
    talk.say("b")
    assert talk.ask(b'{"prompt": "a b;c "}') == "c "
    talk.say("d", reason="length")
    assert talk.ask(b'{"prompt": "a b;c d\\n"}') == "\n", "the model was cut, it has written no stop string"
    talk.say("e")
    with pytest.raises(EditedError, match="does not begin with the one before"):
        talk.ask(b'{"prompt": "a b c d"}')


def test_the_longest_stop_string_is_the_one_that_was_written() -> None:
    talk = Talk(PlainTemplate(), stops=["\n", "\n\n"])
    talk.ask(b'{"prompt": "a "}')
    talk.say("b")
    assert talk.ask(b'{"prompt": "a b\\n\\nc"}') == "c"


# ---- tool calls


def read_hermes(text: str) -> tuple[str, Any]:
    parts = LAYOUTS["hermes"].read(text, tools=[TOOL], in_thoughts=False)
    return parts.content, parts.calls


CALL = '<tool_call>\n{"name": "add", "arguments": {"of": [1, "é"]}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (CALL, "", ["add"]),
        (f"I add.\n{CALL}\n{CALL}\n", "I add.", ["add", "add"]),
        ("<tool_call>{'name': 'add'}</tool_call>", None, []),
        ('<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', None, []),
        ('<tool_call>{"name": 7, "arguments": {}}</tool_call>', None, []),
        (f"{CALL}<tool_call>cut", "<tool_call>cut", ["add"]),
        (f"{CALL}<tool_call></tool_call>", None, []),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", None, []),
        ('<tool_call>{"name": "add", "arguments": {"of": "\\ud800"}}</tool_call>', None, []),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', None, []),
        ("nothing", None, []),
    ],
)
def test_calls_are_read_from_the_text_or_left_in_it(text: str, content: str | None, names: list[str]) -> None:
    rest, calls = read_hermes(text)
    assert rest == (text if content is None else content)
    assert [name for name, _ in calls] == names
    assert all(arguments == {"of": [1, "é"]} for _, arguments in calls)


def test_half_a_surrogate_pair_in_a_call_goes_to_and_fro_as_text() -> None:
    talk, half = Talk(CHATML), '<tool_call>{"name": "add", "arguments": {"of": "\\ud800"}}</tool_call>'
    talk.ask(chat(user("a"), tools=[TOOL]))
    answer = talk.say(half)
    assert (answer.content, answer.tool_calls) == (half, ())
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"of": "\\ud800"}'}}
    other = {"role": "assistant", "tool_calls": [call]}
    assert "ud800" in talk.ask(chat(user("a"), said(answer), other, tools=[TOOL]))


def test_calls_are_read_only_where_there_are_tools() -> None:
    talk = Talk(CHATML)
    talk.ask(chat(user("a")))
    answer = talk.say(CALL)
    assert (answer.content, answer.finish_reason) == (CALL, "stop")
    talk = Talk(CHATML)
    talk.ask(chat(user("a"), tools=[TOOL]))
    assert talk.say(CALL).finish_reason == "tool_calls"


def calling(arguments: str) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'


SENT_BACK = [
    ('{"x": 1.0}', '{"x":1}'),
    ('{"x": 1e2, "y": [-0.0]}', '{"y": [0], "x": 100}'),
    ('{"x": 100000000000000000000000}', '{"x": 1e+23}'),
    ('{"x": 0.10}', '{"x": 1e-1}'),
    ('{"x": {"y": 12345678901234567890}}', '{"x": {"y": 12345678901234567890}}'),
]
OTHERS = [
    ('{"x": 1}', '{"x": true}'),
    ('{"x": 1}', '{"x": "1"}'),
    ('{"x": 9007199254740993}', '{"x": 9007199254740992}'),
    ('{"x": 1.5}', '{"x": 1}'),
    ('{"x": 0}', '{"x": null}'),
]


def sent_back(arguments: str, back: str) -> Reading:
    """What the model reads when its call comes back in another spelling."""
    talk = Talk(CHATML)
    talk.ask(chat(user("a"), tools=[TOOL]))
    message = said(talk.say(calling(arguments)))
    message["tool_calls"][0]["function"]["arguments"] = back
    return talk.branch(chat(user("a"), message, user("b"), tools=[TOOL]))


@pytest.mark.parametrize(("arguments", "back"), SENT_BACK)
def test_arguments_of_the_same_value_are_the_same(arguments: str, back: str) -> None:
    assert sent_back(arguments, back) == sent_back(arguments, arguments)
    assert not sent_back(arguments, back).context


@pytest.mark.parametrize(("arguments", "back"), OTHERS)
def test_arguments_of_another_value_begin_a_context(arguments: str, back: str) -> None:
    assert sent_back(arguments, back).context


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "[[NaN]]", "[" * 200 + "]" * 200])
def test_what_is_no_json_is_no_call(number: str) -> None:
    text = calling(f'{{"x": {number}}}')
    assert read_hermes(text) == (text, ())
    talk = Talk(CHATML)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": f'{{"x": {number}}}'}}
    assert number[:4] in talk.ask(chat(user("a"), {"role": "assistant", "tool_calls": [call]}, user("b")))


def test_a_request_of_too_many_levels_is_one_line() -> None:
    with pytest.raises(BadRequestError, match="levels, and 100 are read"):
        parse_chat(chat(user("a"), tools=[json.loads('{"a":' * 150 + "1" + "}" * 150)]))


@pytest.mark.parametrize(
    ("text", "content", "count"),
    [
        (f"<think>I could {CALL}</think>no", f"<think>I could {CALL}</think>no", 0),
        (f"<think>I could {CALL}</think>{CALL}", f"<think>I could {CALL}</think>", 1),
        (f"<think>a</think>{CALL}<think>{CALL}", f"<think>a</think><think>{CALL}", 1),
        (calling('{"of": "<think>"}') + CALL, "", 2),
        ("<think><tool_call>half</tool_call></think>no", "<think><tool_call>half</tool_call></think>no", 0),
    ],
)
def test_a_call_in_a_thought_is_no_call(text: str, content: str, count: int) -> None:
    rest, calls = read_hermes(text)
    assert (rest, len(calls)) == (content, count)


def test_the_job_may_have_calls_in_thoughts() -> None:
    for allowed in (False, True):
        talk = Talk(CHATML, calls_in_thoughts=allowed)
        talk.ask(chat(user("a"), tools=[TOOL]))
        assert bool(talk.say(f"<think>{CALL}</think>").tool_calls) == allowed


def test_a_thought_that_the_template_began_is_a_thought() -> None:
    thinking = TOOL_TEMPLATE.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
    assert thinking != TOOL_TEMPLATE
    talk = Talk(ChatTemplate(chat_tokenizer(template=thinking), chat=Chat(), ends={2: END}))
    talk.ask(chat(user("a"), tools=[TOOL]))
    cut = talk.say(f"perhaps {CALL}", reason="length")
    assert (cut.content, cut.tool_calls) == (f"perhaps {CALL}", ())
    talk.ask(chat(user("a"), said(cut), user("b"), tools=[TOOL]))
    answer = talk.say(f"yes {CALL}</think>{CALL}")
    assert (answer.content, len(answer.tool_calls)) == (f"yes {CALL}</think>", 1)


def test_tools_that_the_template_ignores_are_refused() -> None:
    deaf = ChatTemplate(chat_tokenizer(), chat=Chat(), ends={2: END})
    with pytest.raises(BadRequestError, match="chat template ignores tools") as caught:
        Talk(deaf).ask(chat(user("a"), tools=[TOOL]))
    assert (caught.value.param, caught.value.status) == ("tools", 400)
    assert Talk(deaf).ask(chat(user("a")))


# ---- properties

texts = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(
    [CALL, END, "<|im_start|>user\n", "<think>"]
)


@given(
    turns=st.lists(
        st.tuples(texts, st.lists(st.tuples(st.sampled_from(["user", "tool", "system"]), texts), max_size=3)),
        max_size=4,
    ),
    first=texts,
    tools=st.booleans(),
)
def test_what_is_read_and_written_is_what_was_said_in_order(turns: list[Any], first: str, tools: bool) -> None:
    """Whatever is said, each request goes on, and the model's own text stands in the whole as it was written."""
    fields = {"tools": [TOOL]} if tools else {}
    talk, history, written = Talk(CHATML), [user(first)], []
    written.append(talk.ask(chat(*history, **fields)))
    for said_text, new in turns:
        answer = talk.say(said_text)
        history += [said(answer), *({"role": role, "content": text} for role, text in new)]
        written += [said_text, talk.ask(chat(*history, **fields))]
        assert written[-1].startswith(END)
    assert talk.text == "".join(written)


@given(parts=st.lists(st.tuples(texts, texts), max_size=4), first=texts)
def test_a_text_that_grows_is_the_sum_of_what_was_added(parts: list[tuple[str, str]], first: str) -> None:
    talk, whole = Talk(PlainTemplate()), first
    talk.ask(json.dumps({"prompt": whole}).encode())
    for own, added in parts:
        talk.say(own)
        whole += own + added
        assert talk.ask(json.dumps({"prompt": whole}).encode()) == added
    assert talk.text == whole


@given(
    turns=st.lists(st.tuples(texts, texts, st.sampled_from(["go on", "drop", "replace", "again"])), max_size=6),
    first=texts,
)
def test_each_context_is_a_conversation_of_its_own(turns: list[Any], first: str) -> None:
    """However a history is edited: what the model has read and written is what the same session alone has, from its first request on."""
    talk, alone, history = Talk(CHATML), Talk(CHATML), [user(first)]
    talk.ask(chat(*history))
    alone.ask(chat(*history))
    for said_text, new, edit in turns:
        answer = talk.say(said_text)
        assert alone.say(said_text).content == answer.content
        known = [*history, said(answer)]
        edits = {"drop": known[1:], "replace": [user(new), *known[1:]], "again": [user(new)]}
        history = [*edits.get(edit, known), user(new)]
        edited = history[: len(known)] != known
        alone = Talk(CHATML) if edited else alone
        reading = talk.branch(chat(*history))
        assert reading == Reading(text=alone.ask(chat(*history)), context=edited)
        assert talk.text == alone.text
