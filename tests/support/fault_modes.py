"""Jobs of many modes, small: one for each way of work that a campaign of faults is to reach."""

import json
from pathlib import Path
from typing import Any

from support.fault_campaign import Build
from support.jobs import simulated_job, tiny_job, write_prompts
from support.supervised_jobs import supervised_job, write_model, write_rows, write_turns
from support.tiny_folder import tiny_folder
from support.turn_runs import BRANCHING, FAIR, MANY, ONE, PROGRAM

SIMULATED_STEPS, TORCH_STEPS = 80, 24
STEP_S = 0.15
JUDGE = "judge-url"
"""File with the address of a judge."""
TWO = {"scaling": {"static": {"replicas": 2}}}

PLUG_INS = '''
"""Functions that users write: of seeds alone."""
import random

def half(*, prompt, completion, answer, metadata):
    assert prompt.startswith("half ") and metadata["of"] == "half", prompt
    return 0.5

def told(item):
    return {**item, "question": item["question"]}

def longer(*, prompt, completion, answer, metadata):
    return min(1.0, len(completion) / 24)

class Game:
    def __init__(self, seed):
        self.turns, self.most = 0, 1 + seed % 4

    def step(self, completion):
        self.turns += 1
        return "on ", 0.25, self.turns == self.most

def play(*, question, answer, metadata, seed):
    return Game(seed)
'''


def simulated(base: Path, *, staleness: int = 1, replicas: int = 2, **pipeline: Any) -> dict[str, Any]:
    """The job that the other simulated ones begin with."""
    write_prompts(base / "prompts.jsonl")
    (base / "plug_ins.py").write_text(PLUG_INS)
    job = simulated_job(steps=SIMULATED_STEPS, staleness=staleness, replicas=replicas)
    job["spec"]["trainer"]["engine"]["simulated"] = {"secondsPerStep": STEP_S}
    job["spec"]["failurePolicy"]["maxRestarts"] = 1000
    job["spec"]["pipeline"] |= pipeline
    return job


def mixture(base: Path) -> dict[str, Any]:
    job = simulated(base)
    del job["spec"]["task"]["dataset"], job["spec"]["task"]["rewards"]
    for name in ("held", "half", "game"):
        rows = [{"prompt": f"{name} {n}", "answer": f"{name} {n}", "of": name} for n in range(50)]
        (base / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more: dict[str, dict[str, Any]] = {
        "held": {"rewards": [{"name": "answer", "exactMatch": {}}], "weight": 3},
        "half": {"rewards": [{"name": "half", "python": {"function": "plug_ins:half"}}], "weight": 2},
        "game": {
            "rewards": [{"name": "won", "environment": {}}],
            "environment": {"python": {"function": "plug_ins:play"}, "maxTurns": 5},
            "maxTokens": 16,
            "weight": 1,
        },
    }
    job["spec"]["task"] |= {
        "mixture": [
            {"name": name, "dataset": {"jsonl": {"path": f"{name}.jsonl", "heldOutPercent": 20}}, **one}
            for name, one in more.items()
        ],
        "processes": 2,
    }
    return job


def environment(base: Path) -> dict[str, Any]:
    job = simulated(base)
    job["spec"]["task"] |= {
        "environment": {"python": {"function": "plug_ins:play"}, "maxTurns": 5},
        "rewards": [{"name": "won", "environment": {}}],
        "processes": 3,
    }
    return job


def rewards(base: Path) -> dict[str, Any]:
    job = simulated(base)
    job["spec"]["task"] |= {
        "rewards": [
            {"name": "long", "weightPercent": 50, "python": {"function": "plug_ins:longer"}},
            {"name": "answer", "weightPercent": 50, "exactMatch": {}},
        ],
        "processes": 3,
    }
    return job


def lent(base: Path) -> dict[str, Any]:
    job = simulated(base, replicas=1)
    own = job["spec"]["generators"][0]
    job["spec"]["generators"].append({**own, "name": "lent", "devices": "Trainer"})
    return job


def colocated(base: Path) -> dict[str, Any]:
    return simulated(base, staleness=0, mode="Colocated")


def batch(base: Path) -> dict[str, Any]:
    return simulated(base, mode="Batch", maxStalenessSteps=2)


def whole_samples(base: Path) -> dict[str, Any]:
    return simulated(base, staleness=2, partialRollouts=False)


def in_order(base: Path) -> dict[str, Any]:
    return simulated(base, staleness=0, delivery="Logical")


def folder_weights(base: Path) -> dict[str, Any]:
    job = simulated(base)
    (base / "weights").mkdir()
    job["spec"]["weights"] = {"folder": {"url": str(base / "weights"), "deltas": True}}
    return job


def deltas(base: Path) -> dict[str, Any]:
    job = simulated(base)
    job["spec"]["weights"] = {"http": {"deltas": True}}
    return job


def two_pools(base: Path) -> dict[str, Any]:
    job = simulated(base)
    slow = {"slots": 3, "latency": [{"batch": 1, "milliseconds": 3.0}], "meanTokens": 20.0}
    job["spec"]["generators"].append({"name": "slow", "engine": {"simulated": slow}, **TWO})
    job["spec"]["scheduling"] |= {"dispatch": {"auto": {}}, "rebalance": {"gainPercent": 0.0}}
    return job


def elastic(base: Path) -> dict[str, Any]:
    job = simulated(base)
    job["spec"]["generators"][0]["scaling"] = {"auto": {"maxReplicas": 3, "cooldownSeconds": 2}}
    return job


def ranked_and_tracked(base: Path) -> dict[str, Any]:
    job = simulated(base)
    job["spec"]["scheduling"] |= {"lengthSignals": ["Ranker"], "ranker": {"hashing": {}}}
    job["spec"]["scheduling"]["dispatch"] = {"skewAware": {"split": "Searched"}}
    job["spec"]["trackers"] = {"tensorBoard": {}, "sampleIntervalSteps": 5}
    return job


def judge(base: Path) -> dict[str, Any]:
    """Whose address the test has written down."""
    job = simulated(base)
    chat = {"model": "judge", "prompt": "Right? {completion}"}
    options = {"url": (base / JUDGE).read_text(), "chat": chat}
    job["spec"]["task"]["rewards"] = [{"name": "judge", "timeoutSeconds": 30.0, "http": options}]
    return job


def agents(base: Path, *, program: str = FAIR + ONE, **agent: Any) -> dict[str, Any]:
    job = simulated(base)
    (base / "agent.py").write_text(PROGRAM + program)
    job["spec"]["task"]["agent"] = {"command": ["python", "-S", "agent.py"], **agent}
    job["spec"]["task"]["rewards"] = [{"name": "game", "environment": {}}]
    return job


def agents_apart(base: Path) -> dict[str, Any]:
    return agents(base, pool=TWO, sessions=8)


def agents_branching(base: Path) -> dict[str, Any]:
    return agents(base, program=BRANCHING + MANY, sessionsPerProgram=24)


def torch(base: Path, **pipeline: Any) -> dict[str, Any]:
    """The job that the other ones with torch begin with."""
    write_prompts(base / "prompts.jsonl")
    (base / "plug_ins.py").write_text(PLUG_INS)
    job = tiny_job(steps=TORCH_STEPS, replicas=2)
    job["spec"]["pipeline"] |= pipeline
    job["spec"]["trainer"] = {"microBatchTokens": 128, "learningRate": 0.01}
    job["spec"]["storage"] = {"checkpoints": {"intervalSteps": 3}}
    job["spec"]["failurePolicy"] = {"maxRestarts": 1000}
    return job


def frozen(base: Path) -> dict[str, Any]:
    job = torch(base)
    job["spec"]["algorithm"] = {"grpo": {"referenceKl": {"coefficient": 0.01}}}
    job["spec"]["trainer"]["reference"] = {"pool": "frozen"}
    job["spec"]["generators"][0]["scaling"] = {"static": {"replicas": 1}}
    job["spec"]["generators"].append({"name": "frozen", "engine": {"hf": {"slots": 4}}, **TWO})
    return job


def distillation(base: Path) -> dict[str, Any]:
    job = torch(base)
    model, teacher = tiny_folder(base / "model"), tiny_folder(base / "teacher", seed=1)
    job["spec"]["model"] = {"path": {"directory": str(model)}}
    job["spec"]["algorithm"] = {"distillation": {"teacher": {"path": {"directory": str(teacher)}}}}
    return job


def trajectory_balance(base: Path) -> dict[str, Any]:
    job = torch(base, maxStalenessSteps=4)
    job["spec"]["algorithm"] = {
        "trajectoryBalance": {"beta": 0.5, "miniBatches": 2, "replay": {"sharePercent": 30, "capacity": 8}}
    }
    return job


def archer(base: Path) -> dict[str, Any]:
    job = torch(base)
    job["spec"]["algorithm"] = {
        "archer": {"replay": {"sharePercent": 50, "capacity": 64}, "resample": {"sharePercent": 50}}
    }
    job["spec"]["task"] |= {
        "environment": {"python": {"function": "plug_ins:play"}, "maxTurns": 5},
        "rewards": [{"name": "won", "environment": {}}],
        "sampling": {"maxTokens": 4},
        "processes": 2,
    }
    return job


def ppo(base: Path) -> dict[str, Any]:
    job = torch(base)
    job["spec"]["algorithm"] = {
        "ppo": {"epochs": 2, "miniBatches": 2, "critic": {"learningRate": 0.01, "warmUpSteps": 3}}
    }
    return job


def dapo(base: Path) -> dict[str, Any]:
    job = torch(base)
    job["spec"]["algorithm"] = {"dapo": {"dynamicSampling": {"maxDrawsPerStep": 3}}}
    return job


def lora(base: Path) -> dict[str, Any]:
    job = torch(base)
    job["spec"]["trainer"]["lora"] = {"rank": 4}
    return job


def unmerged(base: Path) -> dict[str, Any]:
    job = lora(base)
    job["spec"]["trainer"]["precision"] = "BF16"
    return job


def sherl(base: Path) -> dict[str, Any]:
    job = torch(base)
    job["spec"]["model"]["scratch"]["layers"] = 2
    job["spec"]["trainer"]["sherl"] = {"lateLayers": 1, "width": 8}
    return job


def torch_mixture(base: Path) -> dict[str, Any]:
    job, mixed = torch(base), mixture(base)["spec"]["task"]["mixture"]
    task = job["spec"]["task"]
    del task["dataset"], task["rewards"]
    task |= {"mixture": mixed, "processes": 2}
    return job


def ranks(base: Path) -> dict[str, Any]:
    job = torch(base)
    job["spec"]["trainer"] |= {"processesPerNode": 2, "rankTimeoutSeconds": 20}
    return job


def supervised(base: Path, **algorithm: Any) -> dict[str, Any]:
    write_rows(base)
    write_model(base)
    job = supervised_job(**algorithm)
    job["spec"]["failurePolicy"]["maxRestarts"] = 1000
    job["spec"]["pipeline"]["steps"] = TORCH_STEPS
    return job


def supervised_weighted(base: Path) -> dict[str, Any]:
    return supervised(base, rewardField="reward", weights={"advantage": {"beta": 0.5}})


def supervised_evaluated(base: Path) -> dict[str, Any]:
    """With a pool for the held-out reward alone, and the answers as they arrive."""
    job = supervised(base)
    job["spec"]["task"]["rewards"] = [{"name": "answer", "exactMatch": {}}]
    job["spec"]["generators"] = [{"name": "tiny", "engine": {"hf": {"slots": 8}}, **TWO}]
    job["spec"]["pipeline"]["delivery"] = "Arrival"
    return job


def turns(base: Path, weights: dict[str, Any]) -> dict[str, Any]:
    job = supervised(base, answers="Tokens", rewardField="reward", weights=weights)
    write_turns(base)
    job["spec"]["pipeline"]["batchGroups"] = 4
    return job


def dual_generator(base: Path) -> dict[str, Any]:
    return turns(base, {"dualGenerator": {"sharePercent": 30}})


def critic(base: Path) -> dict[str, Any]:
    """IQL from a log of several turns."""
    return turns(base, {"critic": {"learningRate": 0.01, "warmUpSteps": 1, "miniBatches": 2}})


MODES: dict[str, Build] = {
    one.__name__: one
    for one in (
        mixture,
        environment,
        rewards,
        lent,
        colocated,
        batch,
        whole_samples,
        in_order,
        folder_weights,
        deltas,
        two_pools,
        elastic,
        ranked_and_tracked,
        judge,
        agents,
        agents_apart,
        agents_branching,
        frozen,
        distillation,
        trajectory_balance,
        archer,
        ppo,
        dapo,
        lora,
        unmerged,
        sherl,
        torch_mixture,
        ranks,
        supervised,
        supervised_weighted,
        supervised_evaluated,
        dual_generator,
        critic,
    )
}
"""By name."""
