"""The programs of a real cluster: found, or built once from the Go modules in `tests/cluster/go` into a cache.

Owns where they lie and how they are built. A build is keyed by the module's version and the hash of its files, made under
a file lock at low priority, and put in place by a rename: two test runs build it once, and half a program is never seen.

    python -m cluster.harness.tools build level1 | level2 | all     (with PYTHONPATH=tests)
    python -m cluster.harness.tools path kubectl
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GO = Path(__file__).parent.parent / "go"
LONGEST_BUILD_S = 3600
"""The API server takes eight minutes of two cores; a machine may be busy with much else."""
KUBERNETES = "v1.34.4"
"""Later kubelets refuse cgroup v1 and containerd 1.x, which many test machines have."""
_STAMP = "k8s.io/component-base/version"


class ToolError(Exception):
    """A program cannot be had; the text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A program and where it comes from."""

    name: str
    module: str
    """Folder in `tests/cluster/go`."""
    package: str
    version: str
    level: int
    """1: control plane and clients; 2: a node; 3: tests of scale, of queues, of GitOps, of alerts and dashboards."""
    stamps: tuple[str, ...] = ()
    """Go variables that the linker sets to the version."""
    tags: tuple[str, ...] = ()
    """Of Go's build."""
    fits: str = ""
    """Pattern of versions for which one on PATH is taken; empty = never."""


def _kubernetes(name: str, level: int, fits: str = "") -> Tool:
    package = f"k8s.io/kubernetes/cmd/{name}"
    return Tool(name=name, module="kubernetes", package=package, version=KUBERNETES, level=level, fits=fits)


def _prometheus(name: str) -> Tool:
    return Tool(
        name=name,
        module="prometheus",
        package=f"github.com/prometheus/prometheus/cmd/{name}",
        version="v0.310.0",
        level=3,
        stamps=("github.com/prometheus/common/version.Version",),
        tags=("remove_all_sd",),
    )


TOOLS = {
    tool.name: tool
    for tool in (
        Tool(name="etcd", module="etcd", package="go.etcd.io/etcd/server/v3", version="v3.6.5", level=1),
        _kubernetes("kube-apiserver", 1),
        _kubernetes("kube-controller-manager", 1),
        _kubernetes("kubectl", 1, fits=r"v1\.3[345]\.\d+"),  # one minor release apart is what Kubernetes supports
        Tool(
            name="helm",
            module="helm",
            package="helm.sh/helm/v3/cmd/helm",
            version="v3.19.5",
            level=1,
            stamps=("helm.sh/helm/v3/internal/version.version",),
            fits=r"v3\.1[4-9]\.\d+|v3\.2\d\.\d+",
        ),
        _kubernetes("kube-scheduler", 2),
        _kubernetes("kubelet", 2),
        _kubernetes("kube-proxy", 2),
        Tool(name="coredns", module="coredns", package=".", version="v1.12.4", level=2),
        Tool(
            name="kwok",
            module="kwok",
            package="sigs.k8s.io/kwok/cmd/kwok",
            version="v0.7.0",
            level=3,
            stamps=("sigs.k8s.io/kwok/pkg/consts.Version",),
        ),
        Tool(
            name="kueue",
            module="kueue",
            package="sigs.k8s.io/kueue/cmd/kueue",
            version="v0.15.0",
            level=3,
            stamps=("sigs.k8s.io/kueue/pkg/version.GitVersion",),
        ),
        Tool(name="gitops", module="gitops", package=".", version="v0.37.2", level=3),
        _prometheus("promtool"),
        _prometheus("prometheus"),
    )
}
"""In the order in which they are needed."""


def tool(name: str) -> Path:
    """Return the program `name`; build it where there is none that fits."""
    if name not in TOOLS:
        raise ToolError(f"tool: must be one of {', '.join(TOOLS)}; got {name!r}")
    one = TOOLS[name]
    return _given(one) or _on_path(one) or _built(one)


def missing(level: int = 1) -> list[str]:
    """Names of the programs up to `level` that would have to be built."""
    return [
        one.name
        for one in TOOLS.values()
        if one.level <= level and not (_given(one) or _on_path(one) or _cached(one).exists())
    ]


def build(level: int) -> dict[str, Path]:
    """Have every program up to `level`."""
    return {one.name: tool(one.name) for one in TOOLS.values() if one.level <= level}


def _given(one: Tool) -> Path | None:
    """From the folder that KUBEBUILDER_ASSETS names, as for Go's envtest."""
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    path = Path(folder, one.name) if folder else None
    return path if path is not None and os.access(path, os.X_OK) else None


def _on_path(one: Tool) -> Path | None:
    found = shutil.which(one.name) if one.fits else None
    if found is None:
        return None
    arguments = ["version", "--client"] if one.name == "kubectl" else ["version", "--short"]
    answer = subprocess.run([found, *arguments], capture_output=True, text=True, timeout=30, check=False)
    version = re.search(r"v\d+\.\d+\.\d+\S*", answer.stdout)
    return Path(found) if version and re.fullmatch(rf"(?:{one.fits})(?:\+\S*)?", version.group()) else None


def _cached(one: Tool) -> Path:
    return cache() / one.module / f"{one.version}-{_module_hash(one)}" / one.name


def cache() -> Path:
    """Return the folder of all that is built or downloaded for test clusters."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "streamrl"


def _module_hash(one: Tool) -> str:
    digest = hashlib.sha256()
    for path in sorted((GO / one.module).iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _built(one: Tool) -> Path:
    path = _cached(one)
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # One build at a time: the programs share most packages, and two at once would compile these twice.
    with (
        _locked(cache() / ".build.lock", f"other builds, to begin that of {one.name}"),
        _locked(path.with_name(f".{one.name}.lock"), f"the build of {one.name} by another process"),
    ):
        if not path.exists():
            _compile(one, path)
    return path


def _compile(one: Tool, path: Path) -> None:
    go = shutil.which("go")
    if go is None:
        raise ToolError(f"{one.name} {one.version} must be built: install Go 1.24 or newer, or set KUBEBUILDER_ASSETS")
    begun = time.monotonic()
    sys.stderr.write(f"building {one.name} {one.version} into {path.parent}\n")
    half = path.with_name(f".{one.name}.{os.getpid()}")
    flags = " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in _stamps(one).items())])
    command = ["nice", go, "build", "-trimpath", "-buildvcs=false", "-tags", ",".join(one.tags), "-ldflags", flags]
    with path.with_name(f".{one.name}.log").open("w+") as log:
        try:
            done = subprocess.run(
                [*command, "-o", str(half), one.package],
                cwd=GO / one.module,
                env=os.environ | {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly"},
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=LONGEST_BUILD_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ToolError(f"build of {one.name}: not done after {LONGEST_BUILD_S} s; log: {log.name}") from None
        if done.returncode != 0:
            log.seek(0)
            raise ToolError(f"build of {one.name} failed: {_tail(log.read())}")
    half.rename(path)
    sys.stderr.write(f"built {one.name} in {time.monotonic() - begun:.0f} s\n")


def _stamps(one: Tool) -> dict[str, str]:
    if one.module != "kubernetes":
        return dict.fromkeys(one.stamps, one.version)
    major, minor, _ = one.version.removeprefix("v").split(".")
    return {
        f"{_STAMP}.gitVersion": one.version,
        f"{_STAMP}.gitMajor": major,
        f"{_STAMP}.gitMinor": minor,
        f"{_STAMP}.gitTreeState": "archive",
    }


def _tail(text: str, lines: int = 15) -> str:
    return "\n".join(text.splitlines()[-lines:])


@contextlib.contextmanager
def _locked(path: Path, awaited: str) -> Iterator[None]:
    """Hold the lock file `path`; its holder's end frees it, however it ends."""
    deadline = time.monotonic() + LONGEST_BUILD_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ToolError(f"waited {LONGEST_BUILD_S} s for {awaited} (lock {path})") from None
                time.sleep(0.5)
        yield


def main(arguments: list[str]) -> int:
    """Run the command line."""
    levels = {"level1": 1, "level2": 2, "all": 3}
    try:
        match arguments:
            case ["build", which] if which in levels:
                paths = build(levels[which])
                sys.stdout.write("".join(f"{name}\t{path}\n" for name, path in paths.items()))
            case ["build" | "path", name]:
                sys.stdout.write(f"{tool(name)}\n")
            case _:
                sys.stderr.write((__doc__ or "") + "\n")
                return 2
    except ToolError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
