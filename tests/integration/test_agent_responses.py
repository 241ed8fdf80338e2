"""The Responses API by OpenAI's own client, unchanged, in the real task pool: whole and streamed, with tools, and what is refused."""

from pathlib import Path

import pytest

from streamrl.keys import ENV_MODEL_PATH
from support.agent_pools import agents, begun
from support.chat_models import END, TOOL_TEMPLATE, chat_tokenizer, save_tokenizer

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
PROGRAM = f"""
items = [{{"role": "user", "content": item["question"]}}]
asked = {{"model": "policy", "instructions": "add", "tools": [{TOOL!r}]}}

def whole():
    return client.responses.create(input=items, **asked)

def streamed():
    with client.responses.stream(input=items, **asked) as events:
        kinds = [event.type for event in events]
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed", kinds
        return events.get_final_response()

for respond in (whole, streamed, whole, streamed):
    response = respond()
    assert response.status == "completed" and response.usage.output_tokens > 0, response
    items += response.output
    for call in (item for item in response.output if item.type == "function_call"):
        output = str(sum(json.loads(call.arguments)["of"]))
        items.append({{"type": "function_call_output", "call_id": call.call_id, "output": output}})
    if items[-1] is response.output[-1]:
        items.append({{"role": "user", "content": response.output_text.upper()}})
earn(len(items))
try:
    client.responses.create(model="policy", input="go on", previous_response_id=response.id)
except Exception as error:
    assert "nothing is stored" in str(error), error
    earn(0.5)
"""
CALL = '<tool_call>{"name": "add", "arguments": {"of": [%s]}}</tool_call>'


async def test_a_conversation_with_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_MODEL_PATH, save_tokenizer(tmp_path / "model", template=TOOL_TEMPLATE))
    async with agents(tmp_path, PROGRAM, chat={}) as pool:
        sample = await begun(pool)
        sample.end = chat_tokenizer().convert_tokens_to_ids(END)
        assert '"name": "add"' in sample.prompt
        assert "<|im_start|>system\nadd<|im_end|>\n" in sample.prompt
        for text in (f"I add. {CALL % '1, 2'}", CALL % "3" + CALL % "3"):
            answers = "<|im_start|>user\n<tool_response>3</tool_response><|im_end|>\n" * text.count("</tool_call>")
            assert (await sample.say(text)).observation == f"\n{answers}<|im_start|>assistant\n"
        assert (await sample.say("x")).observation == "\n<|im_start|>user\nX<|im_end|>\n<|im_start|>assistant\n"
        last = await sample.say("")
        assert (last.reward, last.done, last.error) == (12.5, True, "")
