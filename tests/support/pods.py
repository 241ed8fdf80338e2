"""The containers of a job's pods as plain processes: the operator's own environment, with its directories moved below one.

No cluster: what a container would mount lies in a directory, Services are loopback ports, the kubelet is the test.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl import keys, names
from streamrl.spec import RLJob, parse_job
from streamrl_operator.planning.objects import containers
from support.certificates import NAMESPACE, Authority, Leaf, mount
from support.ports import free_port
from support.runs import DEADLINE_S, streamrl, wait_for

HOST = "127.0.0.1"
UID = "0b9a3a52-8d0e-4a6c-9f0e-0c3a1f6d7e21"
"""Of the RLJob: its name may come again, the files of the one before may still be there."""
MODULES = {
    "prepare": "streamrl_workers.models.prepare",
    "scheduler": "streamrl_workers.scheduler",
    "trainer": "streamrl_workers.trainer.launch",
    "trainer-worker": "streamrl_workers.trainer.launch",
    "generator": "streamrl_workers.generator",
    "agents": "streamrl_workers.tasks.host",
    "link": "streamrl_workers.agent_link",
}
INHERITED = ("PATH", "HOME", "LANG", "OMP_NUM_THREADS", "XDG_CACHE_HOME", "PYTHONPATH")


@dataclass
class Pods:
    """The pods of one job."""

    base: Path
    job: RLJob
    secure: bool
    ca: Authority = field(default_factory=Authority)
    ports: dict[str, int] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    sockets: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="streamrl-")))
    """Of all pods, by their names: a socket's path has a hundred characters at most, which a test's folder may fill."""

    @classmethod
    def make(cls, document: dict[str, Any], *, base: Path, secure: bool = True) -> "Pods":
        """What the operator would make, without the processes."""
        pods = cls(base=base, job=parse_job(document), secure=secure)
        for sub in ("job", "run", "store", "shared", "logs"):
            (base / sub).mkdir(parents=True)
        resolved = pods.job.model_dump(mode="json", by_alias=True, exclude_none=True)
        (base / "job" / keys.FILE_JOB).write_text(json.dumps(resolved))
        pods.ports = {name: free_port() for name in ("grpc", "weights", "scheduler", "trainer", "ranks")}
        if secure:
            pods.mount_all()
        return pods

    @property
    def name(self) -> str:
        return self.job.metadata.name

    @property
    def run_dir(self) -> Path:
        return self.base / "run"

    @property
    def store(self) -> Path:
        inside = Path(names.store_dir(self.name, uid=UID)).relative_to(names.DIR_STORE_VOLUME)
        return self.base / "store" / inside

    # ---- certificates

    def leaf(self, role: str, **changes: Any) -> Leaf:
        return self.ca.leaf(role, **{"namespace": NAMESPACE, "job": self.name, **changes})

    def mount_all(self, *, trusted: tuple[Authority, ...] = ()) -> None:
        """New leaves of `ca` for every role; trusted: `ca`, or those given."""
        for role in ("scheduler", "trainer", "generator", names.AGENTS):
            mount(self.base / "tls" / role, trusted=trusted or (self.ca,), leaf=self.leaf(role))

    # ---- processes

    def start(self, container: str, *arguments: str, pod: str = "", **changes: str | None) -> subprocess.Popen[bytes]:
        """Start a container; `pod`: the name of a generator's. `changes`: environment, None takes a variable away."""
        name = f"{pod}-{container}" if container in ("agents", "link") else pod or container
        env = self.environment(container, pod=pod) | changes
        with self.log(name).open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", MODULES[container], *arguments],
                env={key: value for key, value in env.items() if value is not None},
                cwd=self.base,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.processes[name] = child
        return child

    def start_generator(self, ordinal: int = 0, *, pool: int = 0, **changes: str | None) -> subprocess.Popen[bytes]:
        """A generator of the first pool, or of another one."""
        name = names.pool(self.name, self.job.spec.generators[pool].name)
        return self.start("generator", pod=f"{name}-{ordinal}", **changes)

    def start_agents(self, ordinal: int = 0) -> tuple[str, str]:
        """A pod of agents: its two containers, by their names in `processes`."""
        pod = f"{names.pool(self.name, names.AGENTS)}-{ordinal}"
        for container in ("agents", "link"):
            self.start(container, pod=pod)
        return f"{pod}-agents", f"{pod}-link"

    def start_worker(self, ordinal: int = 0, **changes: str | None) -> subprocess.Popen[bytes]:
        """The pod of a further node of the trainer."""
        return self.start("trainer-worker", pod=f"{names.trainer_workers(self.name)}-{ordinal}", **changes)

    def start_all(self, *, generators: int = 1) -> None:
        """Generators first: they do not wait for the others. The trainer last: so short a run would end without those that start slowly."""
        for ordinal in range(generators):
            self.start_generator(ordinal)
        self.start("scheduler")
        wait_for(lambda: len(self.numbers().get("generators", ())) == generators, what=f"generators; {self.logs()}")
        self.start("trainer")

    def environment(self, container: str, *, pod: str = "") -> dict[str, str | None]:
        """The operator's, moved."""
        if container == "generator":
            of_pod = pod.rpartition("-")[0]
            (pool,) = (one for one in self.job.spec.generators if names.pool(self.name, one.name) == of_pod)
            given = containers.generator_variables(self.job, pool=pool, uid=UID)
        elif container == "agents":
            (self.sockets / pod).mkdir(exist_ok=True)
            given = containers.agents_variables()
        elif container == "link":
            given = containers.agent_link_variables(self.job)
        else:
            of_role = {
                "prepare": containers.prepare_variables,
                "scheduler": containers.scheduler_variables,
                "trainer": containers.trainer_variables,
                "trainer-worker": containers.trainer_worker_variables,
            }
            given = of_role[container](self.job, uid=UID)
        ours = {
            key: self._referred(key, pod=pod) if isinstance(value, Mapping) else self._moved(value, container, pod=pod)
            for key, value in given.items()
            if key not in INHERITED
        }
        inherited = {key: os.environ[key] for key in INHERITED if key in os.environ}
        ports = {
            "scheduler": {keys.ENV_GRPC_PORT: "grpc", keys.ENV_SIGNALS_PORT: "scheduler"},
            "trainer": {keys.ENV_WEIGHTS_PORT: "weights", keys.ENV_SIGNALS_PORT: "trainer"},
        }.get(container, {})
        changed = {key: str(self.ports[name]) for key, name in ports.items()}
        changed |= {key: "0" for key in (keys.ENV_RANK_SIGNALS_PORT, keys.ENV_RANK_WEIGHTS_PORT) if key in given}
        if keys.ENV_MASTER_PORT in given:
            changed[keys.ENV_MASTER_PORT] = str(self.ports["ranks"])
        if pod:
            changed[keys.ENV_SIGNALS_PORT] = "0"
        if keys.ENV_POD_IP in given and container != "trainer":
            changed[keys.ENV_WEIGHTS_PORT] = "0"
            (self.base / pod).mkdir(exist_ok=True)
        if not self.secure and container != "agents":
            changed |= {keys.ENV_TLS_DIR: "", keys.ENV_TOKEN: "token of this job"}
        return inherited | ours | changed

    def _referred(self, key: str, *, pod: str) -> str:
        """What the downward API would say."""
        return {
            keys.ENV_POD_NAME: pod,
            keys.ENV_NODE_ORDINAL: pod.rpartition("-")[2],
            keys.ENV_POD_IP: HOST,
            keys.ENV_MASTER_ADDR: HOST,
        }[key]

    def _moved(self, value: str, container: str, *, pod: str) -> str:
        trainer = names.trainer(self.name)
        if value == f"{trainer}-0.{trainer}":
            return HOST
        places = {
            names.DIR_JOB: self.base / "job",
            names.DIR_TLS: self.base / "tls" / ("agents" if container == "link" else container.removesuffix("-worker")),
            names.DIR_CODE: self.base,
            names.DIR_RUN: self.base / (pod or "run"),
            names.DIR_STORE_VOLUME: self.base / "store",
            names.DIR_SHARED: self.base / "shared",
            names.DIR_TASKS: self.sockets / pod,
        }
        for directory, place in places.items():
            if value == directory or value.startswith(f"{directory}/"):
                return f"{place}{value.removeprefix(directory)}"
        for host in (names.scheduler(self.name), "localhost"):
            for service, port in (("grpc", names.PORT_GRPC), ("weights", names.PORT_WEIGHTS)):
                if value == f"{host}:{port}":
                    return f"{HOST}:{self.ports[service]}"
        return str(value)

    # ---- what a test looks at

    def page(self, container: str, name: str) -> tuple[int, str]:
        """Status and text of a page of the scheduler's or the trainer's signals port; (0, why) if nobody answers."""
        try:
            with urllib.request.urlopen(
                f"http://{HOST}:{self.ports[container]}/{name}", timeout=DEADLINE_S
            ) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def numbers(self, container: str = "scheduler") -> dict[str, Any]:
        """`/numbers`; empty while nobody answers."""
        status, text = self.page(container, "numbers")
        return dict(json.loads(text)) if status == 200 else {}

    def wait_result(self, *, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """What the operator waits for."""
        found = wait_for(lambda: self.numbers().get("result"), what=f"the result; {self.logs()}", deadline_s=deadline_s)
        return dict(found)

    def wait_step(self, step: int) -> None:
        wait_for(lambda: self.numbers().get("step", 0) >= step, what=f"step {step}; {self.logs()}")

    def terminate(self, name: str) -> int:
        """As a kubelet ends a container; its exit code."""
        self.processes[name].send_signal(signal.SIGTERM)
        return self.wait(name)

    def wait(self, name: str) -> int:
        try:
            return self.processes[name].wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} did not end: {self.logs()}") from None

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait(DEADLINE_S)

    def ended(self, name: str) -> bool:
        return self.processes[name].poll() is not None

    def assert_exact(self) -> str:
        """`journal check` of the journal's volume."""
        done = streamrl("journal", "check", str(self.run_dir))
        assert done.returncode == 0, done.stdout + done.stderr + self.logs()
        return done.stdout

    def log(self, name: str) -> Path:
        return self.base / "logs" / f"{name}.log"

    def text(self, name: str) -> str:
        return self.log(name).read_text() if self.log(name).exists() else ""

    def last_line(self, name: str) -> str:
        return self.text(name).strip().splitlines()[-1]

    def logs(self) -> str:
        """Ends of all logs, for a failure's message."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in (self.base / "logs").iterdir())

    def close(self) -> None:
        for child in self.processes.values():
            child.kill()
            child.wait(DEADLINE_S)
        shutil.rmtree(self.sockets, ignore_errors=True)  # closed twice by some
