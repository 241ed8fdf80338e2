"""Chat templates in the layouts of families of models, written for these tests: ends of turns, tools, calls, thoughts.

Each has what a model of the family says, and what its template writes after that. Owns no rule: what is read is `agents/layouts.py`'s.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from streamrl.spec.task import Chat
from streamrl_workers.tasks.chat import ChatTemplate
from support.chat_models import chat_tokenizer

ARGUMENTS = {"text": "x y", "number": 3}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}, "number": {"type": "integer"}}},
    },
}
RESULT = "7"
"""What the tool answers."""
_JSON = json.dumps(ARGUMENTS)
_NAMED = f'{{"name": "add", "arguments": {_JSON}}}'
_TOOLS = "{% for t in tools %}{{ t | tojson }}{{ '\\n' }}{% endfor %}"
_NO_THOUGHT = "{{ m.content.split('</think>')[-1] }}"
"""An earlier turn without its thought."""
_DSML = {"begin": "<｜tool▁call▁begin｜>", "sep": "<｜tool▁sep｜>", "end": "<｜tool▁call▁end｜>"}
_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")


def _calls(each: str, *, before: str = "", after: str = "", between: str = "") -> str:
    """Return a template of a turn's calls; `each` has one as `f`."""
    comma = f"{{% if not loop.last %}}{between}{{% endif %}}"
    loop = f"{{% for c in m.tool_calls %}}{{% set f = c.function %}}{each}{comma}{{% endfor %}}"
    return f"{{% if m.tool_calls %}}{before}{loop}{after}{{% endif %}}"


def _template(*, user: str, assistant: str, tool: str, opening: str, tools: str = "") -> str:
    """Return a template of a message of each role."""
    roles = (
        f"{{% if m.role == 'user' %}}{user}{{% elif m.role == 'assistant' %}}{assistant}{{% else %}}{tool}{{% endif %}}"
    )
    begin = f"{{% if tools %}}{tools}{{% endif %}}" if tools else ""
    open_turn = f"{{% if add_generation_prompt %}}{opening}{{% endif %}}"
    return f"{begin}{{% for m in messages %}}{roles}{{% endfor %}}{open_turn}"


@dataclass(frozen=True, kw_only=True)
class ChatLayout:
    """A family's."""

    template: str
    special: Sequence[str]
    """Special tokens, of which the first ends a turn."""
    ends: Sequence[str] = ()
    """Further tokens that end a turn."""
    others: Sequence[str] = ()
    """Added tokens that are not special."""
    said: str
    """What the model says: a thought if the family has them, and a call."""
    end: str = ""
    """The token with which that turn ends, if not the first."""
    content: str = ""
    """What the program gets, beside the call."""
    reasoning: str = ""
    after: str
    """What follows the end token: the tool's answer, and the beginning of the next turn."""
    drops_thoughts: bool = False
    """Whether the template leaves thoughts out of earlier turns."""

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A token for each character and for each of the family's."""
        made = chat_tokenizer(template=self.template)
        made.add_special_tokens({"eos_token": self.special[0], "additional_special_tokens": list(self.special)})
        made.add_tokens([AddedToken(token, normalized=False, special=False) for token in self.others])
        return made

    @cached_property
    def end_tokens(self) -> Mapping[int, str]:
        """As a model's directory has them."""
        return {self.id_of(token): token for token in (self.special[0], *self.ends)}

    def id_of(self, token: str) -> int:
        found = self.tokenizer.convert_tokens_to_ids(token)
        assert isinstance(found, int)
        return found

    @cached_property
    def chat(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, chat=Chat(), ends=self.end_tokens)

    def tokens(self, text: str) -> list[int]:
        ids: Any = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return list(ids)


def _chatml(*, call: str, tool: str = "<tool_response>\n{{ m.content }}\n</tool_response>", tools: str = _TOOLS) -> str:
    end = "<|im_end|>{{ '\\n' }}"
    return _template(
        tools=f"<|im_start|>system\n{tools}{end}",
        user=f"<|im_start|>user\n{{{{ m.content }}}}{end}",
        assistant=f"<|im_start|>assistant\n{_NO_THOUGHT}{_calls(call, between='{{ chr10 }}')}{end}".replace(
            "{{ chr10 }}", "{{ '\\n' }}"
        ),
        tool=f"<|im_start|>user\n{tool}{end}",
        opening="<|im_start|>assistant{{ '\\n' }}",
    )


_IM = ("<|im_end|>", "<|im_start|>")
_THOUGHT = "<think>\nhm\n</think>\n\n"
_HERMES = '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
_XML = (
    "<tool_call>\n<function={{ f.name }}>{% for k, v in f.arguments | items %}"
    "{{ '\\n' }}<parameter={{ k }}>\n{{ v }}\n</parameter>{% endfor %}{{ '\\n' }}</function>\n</tool_call>"
)
_IM_AFTER = f"\n<|im_start|>user\n<tool_response>\n{RESULT}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
_GLM_PAIRS = (
    "{{ f.name }}{% for k, v in f.arguments | items %}{{ '\\n' }}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v }}</arg_value>{% endfor %}{{ '\\n' }}</tool_call>"
)
_LLAMA_HEAD = "<|start_header_id|>%s<|end_header_id|>\n\n"
_HARMONY_CALL = (
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}{% set ns.name = f.name %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>"
    "{% else %}{% set ns.name = '' %}{% if m.thinking and loop.last %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.thinking }}<|end|>{% endif %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}{% endif %}"
)
_HARMONY_RESULT = (
    "{% if not ns.name %}{{ raise_exception('a tool answers, and no call was made') }}{% endif %}"
    "<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
)


def _deepseek(call: str) -> str:
    begin, end = _CALLS
    return _template(
        tools=_TOOLS,
        user="<｜User｜>{{ m.content }}",
        assistant=f"<｜Assistant｜>{_NO_THOUGHT}{_calls(call, before=begin, after=end)}<｜end▁of▁sentence｜>",
        tool="<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>",
        opening="{% if messages[-1].role != 'tool' %}<｜Assistant｜>{% endif %}",
    )


def _deepseek_layout(*, call: str, said: str) -> ChatLayout:
    return ChatLayout(
        template=_deepseek(call),
        special=("<｜end▁of▁sentence｜>",),
        others=(
            "<｜User｜>",
            "<｜Assistant｜>",
            *_CALLS,
            *_DSML.values(),
            "<｜tool▁output▁begin｜>",
            "<｜tool▁output▁end｜>",
        ),
        said=f"<think>hm</think>{_CALLS[0]}{said}{_CALLS[1]}",
        content="<think>hm</think>",
        after=f"<｜tool▁output▁begin｜>{RESULT}<｜tool▁output▁end｜>",
        drops_thoughts=True,
    )


def _mistral(calls: str) -> str:
    return _template(
        tools="[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]",
        user="[INST]{{ m.content }}[/INST]",
        assistant="{{ m.content }}" + calls + "</s>",
        tool="{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids must have length 9') }}{% endif %}"
        "[TOOL_RESULTS]{{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}[/TOOL_RESULTS]",
        opening="",
    )


_MISTRAL = ("</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_MISTRAL_AFTER = f'[TOOL_RESULTS]{{"content": "{RESULT}", "call_id": "c00010000"}}[/TOOL_RESULTS]'

LAYOUTS: Mapping[str, ChatLayout] = {
    "qwen3": ChatLayout(
        template=_chatml(call=_HERMES),
        special=_IM,
        others=("<think>", "</think>", "<tool_call>", "</tool_call>"),
        said=f"{_THOUGHT}<tool_call>\n{_NAMED}\n</tool_call>",
        content=_THOUGHT.strip(),
        after=_IM_AFTER,
        drops_thoughts=True,
    ),
    "qwen3_5": ChatLayout(
        template=_chatml(call=_XML),
        special=_IM,
        others=("<think>", "</think>", "<tool_call>", "</tool_call>"),
        said=f"{_THOUGHT}<tool_call>\n<function=add>\n<parameter=text>\nx y\n</parameter>\n<parameter=number>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        content=_THOUGHT.strip(),
        after=_IM_AFTER,
        drops_thoughts=True,
    ),
    "smollm3": ChatLayout(
        template=_chatml(call=_HERMES, tool="{{ m.content }}"),
        special=_IM,
        said=f"{_THOUGHT}<tool_call>{_NAMED}</tool_call>",
        content=_THOUGHT.strip(),
        after=f"\n<|im_start|>user\n{RESULT}<|im_end|>\n<|im_start|>assistant\n",
        drops_thoughts=True,
    ),
    "lfm2": ChatLayout(  # its template writes no calls
        template=_chatml(call="", tool="<|tool_response_start|>{{ m.content }}<|tool_response_end|>"),
        special=(*_IM, "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_response_start|>", "<|tool_response_end|>"),
        said='<|tool_call_start|>[add(text="x y", number=3)]<|tool_call_end|>I ask.',
        content="I ask.",
        after=f"\n<|im_start|>user\n<|tool_response_start|>{RESULT}<|tool_response_end|><|im_end|>\n<|im_start|>assistant\n",
    ),
    "olmo3": ChatLayout(
        template=_chatml(
            call="<function_calls>{{ f.name }}({% for k, v in f.arguments | items %}{{ k }}={{ v | tojson }}"
            "{% if not loop.last %}, {% endif %}{% endfor %})</function_calls>",
            tool="{{ m.content }}",
        ),
        special=_IM,
        said='<function_calls>add(text="x y", number=3)</function_calls>',
        after=f"\n<|im_start|>user\n{RESULT}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama3": ChatLayout(
        template=_template(
            tools=_TOOLS,
            user=_LLAMA_HEAD % "user" + "{{ m.content }}<|eot_id|>",
            assistant=_LLAMA_HEAD % "assistant"
            + "{% if m.tool_calls %}"
            + _calls('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}')
            + "{% else %}{{ m.content }}{% endif %}<|eot_id|>",
            tool=_LLAMA_HEAD % "ipython" + "{{ m.content | tojson }}<|eot_id|>",
            opening=_LLAMA_HEAD.replace("\n\n", "{{ '\\n\\n' }}") % "assistant",
        ),
        special=("<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
        ends=("<|eom_id|>",),
        said=f'<|python_tag|>{{"name": "add", "parameters": {_JSON}}}',
        end="<|eom_id|>",
        after=f'<|start_header_id|>ipython<|end_header_id|>\n\n"{RESULT}"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "llama4": ChatLayout(
        template=_template(
            tools=_TOOLS,
            user="<|header_start|>user<|header_end|>\n\n{{ m.content }}<|eot|>",
            assistant="<|header_start|>assistant<|header_end|>\n\n{{ m.content }}"
            + _calls(
                "{{ f.name }}({% for k, v in f.arguments | items %}{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}{% endfor %})",
                before="[",
                after="]",
                between=", ",
            )
            + "<|eot|>",
            tool="<|header_start|>ipython<|header_end|>\n\n{{ m.content | tojson }}<|eot|>",
            opening="<|header_start|>assistant<|header_end|>{{ '\\n\\n' }}",
        ),
        special=("<|eot|>", "<|header_start|>", "<|header_end|>", "<|python_start|>", "<|python_end|>"),
        said='<|python_start|>[add(text="x y", number=3)]<|python_end|>',
        after=f'<|header_start|>ipython<|header_end|>\n\n"{RESULT}"<|eot|><|header_start|>assistant<|header_end|>\n\n',
    ),
    "mistral": ChatLayout(
        template=_mistral(
            _calls(
                '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ c.id }}"}',
                before="[TOOL_CALLS][",
                after="]",
                between=", ",
            )
        ),
        special=(*_MISTRAL, "[TOOL_CALLS]"),
        said=f'[TOOL_CALLS][{{"name": "add", "arguments": {_JSON}, "id": "aB3dE6gH9"}}]',
        after=_MISTRAL_AFTER,
    ),
    "mistral_small": ChatLayout(
        template=_mistral(_calls("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}")),
        special=(*_MISTRAL, "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"),
        said=f"[THINK]hm[/THINK][TOOL_CALLS]add[CALL_ID]aB3dE6gH9[ARGS]{_JSON}",
        content="[THINK]hm[/THINK]",
        after=_MISTRAL_AFTER,
    ),
    "gpt_oss": ChatLayout(
        template="{% set ns = namespace(name='') %}"
        + _template(
            tools=_TOOLS,
            user="<|start|>user<|message|>{{ m.content }}<|end|>",
            assistant=_HARMONY_CALL,
            tool=_HARMONY_RESULT,
            opening="<|start|>assistant",
        ),
        special=("<|return|>", "<|call|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"),
        ends=("<|call|>",),
        said="<|channel|>analysis<|message|>hm<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{_JSON}",
        end="<|call|>",
        reasoning="hm",
        after=f'<|start|>functions.add to=assistant<|channel|>commentary<|message|>"{RESULT}"<|end|><|start|>assistant',
        drops_thoughts=True,
    ),
    "glm4": ChatLayout(
        template=_template(
            tools=_TOOLS,
            user="<|user|>\n{{ m.content }}",
            assistant="<|assistant|>\n{{ m.content }}" + _calls("{{ f.name }}\n{{ f.arguments | tojson }}"),
            tool="<|observation|>\n{{ m.content }}",
            opening="<|assistant|>{{ '\\n' }}",
        ),
        special=("<|endoftext|>", "<|user|>", "<|observation|>", "<|assistant|>"),
        ends=("<|user|>", "<|observation|>"),
        said=f"add\n{_JSON}",
        end="<|observation|>",
        after=f"\n{RESULT}<|assistant|>\n",
    ),
    "glm4_moe": ChatLayout(
        template=_template(
            tools=_TOOLS,
            user="<|user|>\n{{ m.content }}",
            assistant=f"<|assistant|>\n{_NO_THOUGHT}" + _calls("<tool_call>" + _GLM_PAIRS),
            tool="<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>",
            opening="<|assistant|>{{ '\\n' }}",
        ),
        special=("<|endoftext|>", "<|user|>", "<|observation|>", "<|assistant|>"),
        ends=("<|user|>", "<|observation|>"),
        others=("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<tool_response>"),
        said=f"{_THOUGHT}<tool_call>add\n<arg_key>text</arg_key>\n<arg_value>x y</arg_value>\n"
        "<arg_key>number</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        end="<|observation|>",
        content=_THOUGHT.strip(),
        after=f"\n<tool_response>\n{RESULT}\n</tool_response><|assistant|>\n",
        drops_thoughts=True,
    ),
    "deepseek_v3": _deepseek_layout(  # its template puts texts together, so arguments must be one
        call="{begin}{{{{ c.type }}}}{sep}{{{{ f.name + '\\n```json\\n' + f.arguments + '\\n```' }}}}{end}".format(
            **_DSML
        ),
        said="{begin}function{sep}add\n```json\n{json}\n```{end}".format(json=_JSON, **_DSML),
    ),
    "deepseek_v3_1": _deepseek_layout(
        call="{begin}{{{{ f.name }}}}{sep}{{{{ f.arguments | tojson }}}}{end}".format(**_DSML),
        said="{begin}add{sep}{json}{end}".format(json=_JSON, **_DSML),
    ),
    "granite": ChatLayout(
        template=_template(
            tools="<|start_of_role|>available_tools<|end_of_role|>{{ tools | tojson }}<|end_of_text|>\n",
            user="<|start_of_role|>user<|end_of_role|>{{ m.content }}<|end_of_text|>{{ '\\n' }}",
            assistant="<|start_of_role|>assistant<|end_of_role|>{{ m.content }}"
            + _calls(
                '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}',
                before="<|tool_call|>[",
                after="]",
                between=", ",
            )
            + "<|end_of_text|>{{ '\\n' }}",
            tool="<|start_of_role|>tool<|end_of_role|>{{ m.content }}<|end_of_text|>{{ '\\n' }}",
            opening="<|start_of_role|>assistant<|end_of_role|>",
        ),
        special=("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
        said=f"<|tool_call|>[{_NAMED}]",
        after=f"\n<|start_of_role|>tool<|end_of_role|>{RESULT}<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    ),
    "phi4": ChatLayout(
        template=_template(
            tools="<|system|><|tool|>{{ tools | tojson }}<|/tool|><|end|>",
            user="<|user|>{{ m.content }}<|end|>",
            assistant="<|assistant|>{{ m.content }}"
            + _calls(
                '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}',
                before="<|tool_call|>[",
                after="]<|/tool_call|>",
                between=", ",
            )
            + "<|end|>",
            tool="<|tool_response|>{{ m.content }}<|end|>",
            opening="<|assistant|>",
        ),
        special=("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool_response|>"),
        others=("<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>"),
        said=f"<|tool_call|>[{_NAMED}]<|/tool_call|>",
        after=f"<|tool_response|>{RESULT}<|end|><|assistant|>",
    ),
}
"""By family, with tools that are read."""

_GEMMA = {
    "user": "<start_of_turn>user\n{{ m.content }}<end_of_turn>{{ '\\n' }}",
    "opening": "<start_of_turn>model{{ '\\n' }}",
}
GEMMA3 = _template(
    **_GEMMA,
    assistant="<start_of_turn>model\n{{ m.content }}<end_of_turn>{{ '\\n' }}",
    tool="{{ raise_exception('roles must be user and model') }}",
)
"""It knows no tools."""
FUNCTION_GEMMA = _template(
    **_GEMMA,
    tools=_TOOLS,
    assistant="<start_of_turn>model\n{{ m.content }}"
    + _calls(
        "<start_function_call>call:{{ f.name }}{{ '{' }}{% for k, v in f.arguments | items %}{{ k }}:<escape>{{ v }}<escape>{% endfor %}"
        "{{ '}' }}<end_function_call>"
    )
    + "<end_of_turn>{{ '\\n' }}",
    tool="<start_of_turn>tool\n{{ m.content }}<end_of_turn>{{ '\\n' }}",
)
"""Its calls are in a layout that is not read."""
