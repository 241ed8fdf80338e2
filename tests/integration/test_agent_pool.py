"""Programs in the real task pool, most of them OpenAI's own client, unchanged; what one does harms no other."""

import asyncio
import json
import resource
from pathlib import Path

import psutil
import pytest

from streamrl.errors import UserError
from streamrl.keys import ENV_MODEL_PATH
from streamrl_workers.tasks.values import Score, ScoreSample
from support.agent_pools import SEVERAL_TURNS, Sample, agents, begun, hosts
from support.chat_layouts import LAYOUTS
from support.chat_models import END, TOOL_TEMPLATE, chat_tokenizer, save_tokenizer
from support.runs import wait_for
from support.task_pools import fork_servers, wait_ended


async def test_several_turns_of_the_real_client(tmp_path: Path) -> None:
    async with agents(tmp_path, SEVERAL_TURNS) as pool:
        sample = await begun(pool)
        assert sample.prompt.endswith("+1=")
        first, second, last = [await sample.say(text) for text in ("one", "two", "three")]
        assert (first.observation, first.reward, first.done) == ("0:one", 0.75, False)
        assert (second.observation, second.reward, second.done) == ("1:two", 0.75, False)
        assert (last.observation, last.reward, last.done, last.error) == ("", 0.75, True, "")
        (score,) = await pool.score(
            [
                ScoreSample(
                    group_id=0,
                    sample_index=0,
                    split="train",
                    prompt_index=0,
                    completion="three",
                    environment_reward=2.25,
                )
            ]
        )
        assert isinstance(score, Score)
        assert score.reward == 2.25


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
WITH_TOOLS = f"""
TOOLS = [{TOOL!r}]
while True:
    message = ask(tools=TOOLS).choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        messages.append({{"role": "tool", "tool_call_id": call.id, "content": str(sum(arguments["of"]))}})
earn(float(message.content == "7"))
"""
CALL = '<tool_call>{"name": "add", "arguments": {"of": [%s]}}</tool_call>'


async def test_tools_are_rendered_called_and_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_MODEL_PATH, save_tokenizer(tmp_path / "model", template=TOOL_TEMPLATE))
    end = chat_tokenizer().convert_tokens_to_ids(END)
    async with agents(tmp_path, WITH_TOOLS, chat={}) as pool:
        sample = await begun(pool)
        sample.end = end
        assert '"name": "add"' in sample.prompt.splitlines()[1]
        assert sample.prompt.endswith("+1=<|im_end|>\n<|im_start|>assistant\n")
        followed = await sample.say(f"I add. {CALL % '1, 2'}{CALL % '3'}")
        answers = "".join(f"<|im_start|>user\n<tool_response>{n}</tool_response><|im_end|>\n" for n in (3, 3))
        assert followed.observation == f"\n{answers}<|im_start|>assistant\n", "behind the end token that was sampled"
        sample.end = 50  # a letter: the turn was cut
        followed = await sample.say(CALL % "4", reason="length")
        assert followed.observation.startswith("<|im_end|>\n<|im_start|>user\n<tool_response>4<")
        assert (await sample.say("7")).reward == 1.0


async def test_tools_that_the_template_ignores_end_the_run_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_MODEL_PATH, save_tokenizer(tmp_path / "model"))
    async with agents(tmp_path, WITH_TOOLS, chat={}) as pool:
        with pytest.raises(UserError, match=r"spec\.task\.chat: the tokenizer's chat template ignores tools") as caught:
            await begun(pool)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("allowed", [False, True])
async def test_a_call_in_a_thought_is_carried_out_where_the_job_says_so(
    allowed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_MODEL_PATH, save_tokenizer(tmp_path / "model", template=TOOL_TEMPLATE))
    async with agents(tmp_path, WITH_TOOLS, chat={}, callsInThoughts=allowed) as pool:
        answer = await (await begun(pool)).say(f"<think>{CALL % '1, 2'}</think>")
        assert answer.done != allowed


THINKING = f"""
message = ask(tools=[{TOOL!r}]).choices[0].message
earn(float(message.reasoning_content == "hm" and not message.content))
messages.append(message)
messages.append({{"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}})
earn(float(ask(tools=[{TOOL!r}]).choices[0].message.content == "done"))
"""


async def test_a_model_that_thinks_and_calls_in_channels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As GPT-OSS does. Its template writes another end than its model, and a tool's answer only after a call."""
    layout = LAYOUTS["gpt_oss"]
    layout.tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model/generation_config.json").write_text(json.dumps({"eos_token_id": list(layout.end_tokens)}))
    monkeypatch.setenv(ENV_MODEL_PATH, str(tmp_path / "model"))
    async with agents(tmp_path, THINKING, chat={}) as pool:
        sample = await begun(pool)
        sample.end = layout.id_of("<|call|>")
        call = '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"of": [3]}'
        followed = await sample.say(f"<|channel|>analysis<|message|>hm<|end|>{call}")
        role = "<|start|>functions.add to=assistant<|channel|>commentary"
        assert followed.observation == f'{role}<|message|>"3"<|end|><|start|>assistant'
        last = await sample.say("<|channel|>final<|message|>done")
        assert (followed.reward, last.reward, last.done, last.error) == (1.0, 1.0, True, "")


STREAMED = """
chunks = list(ask(stream=True, stream_options={"include_usage": True}))
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert chunks[-1].usage.completion_tokens == 1 and chunks[-1].usage.prompt_tokens == 0, chunks[-1]
assert chunks[-2].choices[0].finish_reason == "length", chunks
messages += [{"role": "assistant", "content": [{"type": "text", "text": text}]}, {"role": "user", "content": text.upper()}]
with client.chat.completions.stream(model="m", messages=messages) as events:
    for event in events:
        pass
    last = events.get_final_completion().choices[0].message.content
assert client.models.list().data[0].id == "policy"
earn(len(last))
"""


async def test_answers_as_streams(tmp_path: Path) -> None:
    async with agents(tmp_path, STREAMED) as pool:
        sample = await begun(pool)
        assert (await sample.say("äö", reason="length")).observation == "ÄÖ"
        last = await sample.say("abc")
        assert (last.reward, last.done, last.error) == (3.0, True, "")


TEXTS = r"""
prompt = item["question"] + " "
for turn in range(2):
    answer = client.completions.create(model="policy", prompt=prompt, max_tokens=5, temperature=0.3)
    prompt += answer.choices[0].text + "\n" + f"turn {turn}\n"
earn(len(prompt))
"""


async def test_text_completions_go_on_behind_the_stop_string(tmp_path: Path) -> None:
    """The model has written the stop string, its text is without it, and the program writes it again."""
    async with agents(tmp_path, TEXTS, sampling={"maxTokens": 16, "stop": ["\n"]}) as pool:
        sample = await begun(pool)
        assert sample.prompt.endswith("+1= ")
        assert (await sample.say("x")).observation == "turn 0\n"
        last = await sample.say("y")
        assert (last.done, last.reward) == (True, len(sample.prompt) + len("x\nturn 0\ny\nturn 1\n"))


# ---- what goes wrong

WRONG = {
    "crash": ("raise RuntimeError('no\\nmore')", "raised", "ended with status 1: more"),
    "exit": ("print('bye'); sys.exit(7)", "raised", "ended with status 7: bye"),
    "hang": ("import time; time.sleep(1000)", "timeout", "neither asked nor ended within 20 s after turn 1"),
    "spin": ("while True: pass", "timeout", "within 20 s"),
    "flood": ("while True: print('x' * 10_000)", "bad_value", "wrote more than 16 MiB of output: x"),
    "die": ("import os; os.kill(os.getpid(), 9)", "died", "ended by signal 9"),
    "edit": (
        "messages[0] = {'role': 'user', 'content': 'else'}; ask()",
        "bad_value",
        "messages[0] is another than before",
    ),
    "forget": ("messages[1]['content'] = 'else'; ask()", "bad_value", "messages[1] is another"),
    "again": ("del messages[1:]; ask()", "bad_value", "it has 1 messages, and there have been 2"),
    "text": ("client.completions.create(model='m', prompt='p')", "bad_value", "it went from chat completions"),
    "big": ("messages.append({'role': 'user', 'content': 'x' * 10_000_000}); ask()", "raised", "at most 1048576 bytes"),
    "long": ("messages.append({'role': 'user', 'content': 'x' * 1000}); ask()", "raised", "maxObservationChars is 500"),
    "many": ("ask(n=2)", "raised", "n is not supported"),
    "logprobs": ("ask(logprobs=True)", "raised", "logprobs is not supported"),
    "image": (
        "messages.append({'role': 'user', 'content': [{'type': 'image_url', 'image_url': {'url': 'x'}}]}); ask()",
        "raised",
        "must be text",
    ),
    "tools": ("ask(tools=[{'type': 'function'}])", "bad_value", "its tools are others than before"),
    "nan": ("earn(float('nan'))", "raised", "Error"),
    "digits": ("earn(10**400)", "raised", "reward must be a finite number"),
    "sum": ("earn(1e308); earn(1e308)", "raised", "must have a finite sum"),
    "word": ("earn('much')", "raised", "reward must be a finite number"),
    "stranger": ("OpenAI(api_key='guess').models.list()", "raised", "must be that of a running session"),
    "keyless": (
        "OpenAI(default_headers={'Authorization': 'Basic x'}).models.list()",
        "raised",
        "must be that of a running session",
    ),
    "elsewhere": ("client.embeddings.create(model='m', input='x')", "raised", "no such call"),
}
MISBEHAVING = """
what = ask().choices[0].message.content
messages.append({"role": "assistant", "content": what})
if what in WRONG:
    exec(WRONG[what])
messages.append({"role": "user", "content": "go on"})
ask()
"""


async def test_what_one_program_does_no_other_notices(tmp_path: Path) -> None:
    """Each fault is one line with its kind; the samples beside them play to their end."""
    program = f"WRONG = { ({name: code for name, (code, _, _) in WRONG.items()})!r}\n{MISBEHAVING}"
    options = {"timeoutSeconds": 20, "maxObservationChars": 500, "maxTurns": 2, "branches": "Fail"}
    async with agents(tmp_path, program, **options) as pool:
        prompt = await begun(pool)
        wrong = [Sample(pool, prompt.prompt, sample=number) for number in range(len(WRONG))]
        right = [Sample(pool, prompt.prompt, sample=number) for number in range(len(WRONG), len(WRONG) + 8)]
        answers = await asyncio.gather(
            *(sample.say(name) for sample, name in zip(wrong, WRONG, strict=True)),
            *(sample.say("well") for sample in right),
        )
        for name, answer in zip(WRONG, answers, strict=False):
            _, kind, text = WRONG[name]
            assert (answer.kind, text in answer.error) == (kind, True), (name, answer)
            assert answer.error.startswith("agent: ")
            assert "\n" not in answer.error
        assert {(answer.observation, answer.error) for answer in answers[len(WRONG) :]} == {("go on", "")}
        ends = await asyncio.gather(*(sample.say("last") for sample in right))
        assert {(answer.done, answer.error) for answer in ends} == {(True, "")}


MORE_THAN_THERE_IS = """
try:
    while True:
        messages.append(ask().choices[0].message)
        messages.append({"role": "user", "content": "more"})
except Exception as error:
    assert error.code == "max_turns", error
    earn(len(messages))
    raise
"""


async def test_beyond_the_last_turn_a_program_may_still_give_its_reward(tmp_path: Path) -> None:
    async with agents(tmp_path, MORE_THAN_THERE_IS, maxTurns=2) as pool:
        sample = await begun(pool)
        assert (await sample.say("a")).observation == "more"
        last = await sample.say("b")
        assert (last.reward, last.done, last.error) == (5.0, False, ""), "not done: the scheduler ends it by the limit"


LIMITS = """
import resource
ask()
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
assert soft == hard, (soft, hard)
assert resource.getrlimit(resource.RLIMIT_NOFILE) == FILES
"""


async def test_a_program_has_no_limits_of_the_hosts(tmp_path: Path) -> None:
    """Other runtimes than Python reserve more address space than they use."""
    async with agents(tmp_path, f"FILES = {resource.getrlimit(resource.RLIMIT_NOFILE)!r}\n{LIMITS}") as pool:
        sample = await begun(pool)
        (host,) = hosts()
        soft, hard = host.rlimit(psutil.RLIMIT_NOFILE)
        assert soft == hard
        assert not (await sample.say("x")).error


LEAVES_CHILDREN = """
import subprocess
for setsid in (False, True):
    subprocess.Popen(["sleep", "1234"], start_new_session=setsid)
ask()
"""


async def test_nothing_of_a_program_is_left(tmp_path: Path) -> None:
    async with agents(tmp_path, LEAVES_CHILDREN) as pool:
        sample = await begun(pool)
        children = [child for server in fork_servers() for child in server.children(recursive=True)]
        asleep = [child for child in children if child.cmdline()[:1] == ["sleep"]]
        assert len(asleep) == 2
        assert (await sample.say("x")).done
        await wait_ended(asleep)


DAEMON = """
import os, subprocess
shell = "sleep 1234 >/dev/null & echo $!"
pid = int(subprocess.run(["setsid", "sh", "-c", shell], stdout=subprocess.PIPE, text=True, check=True).stdout.split()[0])
ask()
os.kill(pid, 0)
"""


async def test_what_a_program_has_in_the_background_outlives_the_ends_of_others(tmp_path: Path) -> None:
    """Its parent has ended and it has left the group: it is the program's, until that ends."""
    async with agents(tmp_path, DAEMON) as pool:
        samples = [await begun(pool, index=index) for index in range(2)]
        for sample in samples:
            assert not (await sample.say("x")).error


IMPATIENT = """
import time
try:
    client = client.with_options(timeout=1, max_retries=0)
    ask()
except Exception:
    client = OpenAI()
    earn(0.5)
    client.post("/end", body={"error": ERROR}, cast_to=object)
    open("gate", "w").close()
    time.sleep(1000)
"""


@pytest.mark.parametrize("error", ["", "no patience"])
async def test_who_waits_for_the_model_no_longer_may_end_its_sample(tmp_path: Path, error: str) -> None:
    async with agents(tmp_path, f"ERROR = {error!r}\n{IMPATIENT}") as pool:
        sample = await begun(pool)
        await asyncio.to_thread(wait_for, (tmp_path / "gate").exists, what="the end of its patience")
        answer = await sample.say("x")
        expected = ("raised", 0.0, f"agent: {error}") if error else (None, 0.5, "")
        assert (answer.kind, answer.reward, answer.error) == expected
        assert answer.done == (not error)


# ---- many samples in one program

SHARED = """
import json, sys, threading, time, os
from openai import OpenAI

common = OpenAI(api_key="none")

def serve(item):
    client = common.with_options(api_key=item["api_key"])
    messages = [{"role": "user", "content": item["question"]}]
    try:
        for turn in range(2):
            what = client.chat.completions.create(model="m", messages=messages).choices[0].message.content
            messages += [{"role": "assistant", "content": what}, {"role": "user", "content": f"{turn}:{what}"}]
            if what == "hang":
                time.sleep(1000)
            if what == "exit":
                os._exit(5)
            if what == "raise":
                raise RuntimeError("no more")
            client.post("/reward", body={"reward": 0.5}, cast_to=object)
    except Exception as error:
        client.post("/end", body={"error": f"{type(error).__name__}: {error}"}, cast_to=object)
    else:
        client.post("/end", cast_to=object)

for line in sys.stdin:
    threading.Thread(target=serve, args=[json.loads(line)], daemon=True).start()
"""


async def test_one_program_plays_many_samples_and_a_fault_costs_its_own_sample(tmp_path: Path) -> None:
    options = {"sessionsPerProgram": 8, "sessions": 16, "timeoutSeconds": 15}
    async with agents(tmp_path, SHARED, client=False, **options) as pool:
        prompt = await begun(pool)
        samples = [Sample(pool, prompt.prompt, sample=number) for number in range(12)]
        said = ["hang", "raise", "exit", *["well"] * 9]
        answers = await asyncio.gather(*(sample.say(text) for sample, text in zip(samples, said, strict=True)))
        assert (answers[0].kind, answers[0].error) == (
            "timeout",
            "agent: neither asked nor ended within 15 s after turn 1",
        )
        assert (answers[1].kind, answers[1].error) == ("raised", "agent: RuntimeError: no more")
        assert (answers[2].kind, answers[2].error) == ("died", "agent: ended with status 5")
        assert {(answer.observation, answer.reward, answer.error) for answer in answers[3:]} == {("0:well", 0.5, "")}
        (host,) = hosts()
        assert len(host.children()) < 9, "few programs play them all"
        ends = await asyncio.gather(*(sample.say("end") for sample in samples[3:]))
        assert {(answer.done, answer.reward, answer.error) for answer in ends} == {(True, 0.5, "")}


async def test_a_program_that_reads_no_more_items_gets_no_more_samples(tmp_path: Path) -> None:
    """It plays on what it has; the others are played elsewhere."""
    closing = (
        SHARED[: SHARED.index("for line in")]
        + """
item = json.loads(sys.stdin.readline())
os.close(0)
serve(item)
time.sleep(1000)
"""
    )
    async with agents(tmp_path, closing, client=False, sessionsPerProgram=8, timeoutSeconds=20) as pool:
        samples = [await begun(pool, index=index) for index in range(3)]
        for text in ("one", "two"):
            answers = await asyncio.gather(*(sample.say(text) for sample in samples))
            assert {(answer.reward, answer.error) for answer in answers} == {(0.5, "")}


async def test_what_a_program_of_many_writes_is_counted_anew_when_a_sample_has_ended_well(tmp_path: Path) -> None:
    loud = SHARED.replace("    messages = ", "    os.write(1, b'x' * (9 << 20))\n    messages = ")
    async with agents(tmp_path, loud, client=False, sessionsPerProgram=8) as pool:
        players = set()
        for index in range(3):
            sample = await begun(pool, index=index)
            assert [(await sample.say(text)).error for text in ("one", "two")] == ["", ""]
            (host,) = hosts()
            players |= {*host.children()}
        assert len(players) == 1
