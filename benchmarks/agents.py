"""What the agents' endpoint costs: many sessions at once, each asking turn after turn, with a model that answers at once.

    python benchmarks/agents.py [--sessions 1000] [--turns 10]

Both placements: the host as a process of the task pool, and one in a pool of its own, behind its link and gRPC (the service of the
scheduler runs in this process). Real: task pool, agent host, link, endpoint, HTTP. The model is this process, which answers each turn when it hears of it, so that all of
the time is ours. Beside it the same client asks a bare Starlette application on uvicorn that echoes the request's last message.
Tells requests a second and quantiles of a request's time, and the memory of the host.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from streamrl.keys import FILE_JOB
from streamrl.spec import parse_job
from streamrl_workers.tasks.pool import TaskPool
from streamrl_workers.tasks.values import NeedPrompts, PlayTurn, Prompt
from support.agent_links import Links
from support.runs import wait_for

CLIENT = """
import asyncio, json, sys, time

async def call(address, path, body, key=""):
    host, port = address.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\\r\\nhost: x\\r\\nauthorization: Bearer {key}\\r\\ncontent-length: {len(data)}\\r\\nconnection: close\\r\\n\\r\\n"
    writer.write(head.encode() + data)
    answer = await reader.read()
    writer.close()
    return json.loads(answer.partition(b"\\r\\n\\r\\n")[2])

async def play(address, key, turns, took):
    messages = [{"role": "user", "content": "begin"}]
    for turn in range(turns):
        begun = time.monotonic()
        answer = await call(address, "/v1/chat/completions", {"model": "m", "messages": messages}, key)
        took.append(time.monotonic() - begun)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": f"turn {turn} of a conversation"}]

async def agent():
    import os
    took, playing, reader = [], set(), asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    address = os.environ["OPENAI_BASE_URL"]
    async def one(key):
        await play(address, key, TURNS, took)
        open("took.json", "w").write(json.dumps(took)) if len(took) >= SESSIONS * TURNS else None
        await call(address, "/v1/end", {}, key)
    while line := await reader.readline():
        task = asyncio.create_task(one(json.loads(line)["api_key"]))
        playing.add(task)
        task.add_done_callback(playing.discard)
    await asyncio.gather(*playing)

async def echo():
    took = []
    await asyncio.gather(*(play(sys.argv[2], "", TURNS, took) for _ in range(SESSIONS)))
    open("took.json", "w").write(json.dumps(took))

asyncio.run(echo() if len(sys.argv) > 1 else agent())
"""
ECHO = """
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

async def answer(request):
    body = await request.json()
    message = {"role": "assistant", "content": body["messages"][-1]["content"]}
    return JSONResponse({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

uvicorn.run(Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])]), port=PORT, log_level="error", http="h11")
"""
PORT = 18_765
SAID = "an answer of the model"


def told(name: str, folder: Path, seconds: float) -> None:
    took = sorted(json.loads((folder / "took.json").read_text()))
    p50, p99 = statistics.median(took), took[int(len(took) * 0.99)]
    print(f"{name}: {len(took)} requests, {len(took) / seconds:,.0f}/s, p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms")


async def model(pool: TaskPool, *, sessions: int) -> float:
    """Answer every turn at once; seconds until all samples have ended."""
    pool.put(NeedPrompts(split="train", first_index=0, count=sessions))
    said: dict[int, list[str]] = {number: [] for number in range(sessions)}
    observed: dict[int, list[str]] = {number: [] for number in range(sessions)}
    ended, begun_s = 0, time.monotonic()
    while ended < sessions:
        for result in await pool.results():
            number = result.index if isinstance(result, Prompt) else result.group_id
            if not isinstance(result, Prompt):
                assert not result.error, result
                ended += result.done
                observed[number].append(result.observation)
                if result.done:
                    continue
            said[number].append(SAID)
            turns = len(said[number])
            pool.put(
                PlayTurn(
                    group_id=number,
                    sample_index=0,
                    lease=turns,
                    split="train",
                    prompt_index=number,
                    completions=tuple(said[number]),
                    last_token=0,
                    prompt="begin",
                    observations=tuple(observed[number]),
                    finish_reasons=("stop",) * turns,
                    token_counts=((1, 1),) * turns,
                )
            )
    return time.monotonic() - begun_s


async def measure(folder: Path, *, sessions: int, turns: int, apart: bool) -> None:
    """`apart`: with a pool of one agent host."""
    run = folder / f"run-{apart}"
    run.mkdir()
    (folder / "lines.jsonl").write_text("".join(f'{{"prompt": "{n}", "answer": "{n}"}}\n' for n in range(99)))
    agent = {
        "command": ["python", "client.py"],
        "sessionsPerProgram": sessions,
        "sessions": sessions,
        "maxTurns": turns,
        **({"pool": {}} if apart else {}),
    }
    spec = {
        "model": {"scratch": {}},
        "task": {
            "dataset": {"jsonl": {"path": "lines.jsonl"}},
            "agent": agent,
            "sampling": {"maxTokens": 16},
            "rewards": [{"name": "game", "environment": {}}],
        },
        "pipeline": {"batchGroups": 2, "steps": 2},
        "generators": [{"name": "local", "engine": {"hf": {}}}],
    }
    job = {"apiVersion": "streamrl.io/v1alpha1", "kind": "RLJob", "metadata": {"name": "agents"}, "spec": spec}
    parsed = parse_job(job)
    (run / FILE_JOB).write_text(parsed.model_dump_json(by_alias=True, exclude_none=True))
    pool = TaskPool(parsed, base_dir=folder)
    await pool.start()
    links = Links(pool, run)
    if apart:
        await links.open()
        links.start("agents-0")
        await links.until(hosts=1)
    seconds = await model(pool, sessions=sessions)
    told(f"endpoint {'apart' if apart else 'in the task pool'}, {sessions} sessions", folder, seconds)
    family = psutil.Process().children(recursive=True)
    (host,) = {one.parent() for one in family if "client.py" in one.cmdline()}
    parts = {"host": host, **{name: psutil.Process(one.pid) for name, one in links.processes.items()}}
    for name, process in parts.items():
        spent_ms, rss = _processor_ms(process.pid, sessions * turns), process.memory_info().rss
        print(f"  {name}: {spent_ms:.2f} ms of processor a request, {rss >> 20} MiB")
    for process in links.processes.values():
        process.kill()
        process.wait()
    if apart:
        await links.shut()
    await pool.close()


def measure_echo(folder: Path, *, sessions: int, turns: int) -> None:
    with subprocess.Popen([sys.executable, "-c", ECHO.replace("PORT", str(PORT))]) as server:
        try:
            wait_for(lambda: psutil.Process(server.pid).net_connections("tcp"), what="the echo's port")
            begun_s = time.monotonic()
            subprocess.run([sys.executable, "client.py", "echo", f"http://127.0.0.1:{PORT}"], cwd=folder, check=True)
            told(f"bare Starlette echo, {sessions} sessions", folder, time.monotonic() - begun_s)
            print(f"  server: {_processor_ms(server.pid, sessions * turns):.2f} ms of processor a request")
        finally:
            server.terminate()


def _processor_ms(pid: int, requests: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return (times.user + times.system) * 1e3 / requests


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "client.py").write_text(
            CLIENT.replace("TURNS", str(args.turns)).replace("SESSIONS", str(args.sessions))
        )
        measure_echo(folder, sessions=args.sessions, turns=args.turns)
        for apart in (False, True):
            asyncio.run(measure(folder, sessions=args.sessions, turns=args.turns, apart=apart))


if __name__ == "__main__":
    main()
