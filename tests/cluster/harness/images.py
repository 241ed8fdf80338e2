"""Images of a test cluster, made without a registry: built once into a cache, then imported into a node.

Owns the archives in the cache and their keys (a hash of all that goes in). Building happens in a mount and PID namespace of
its own: whoever is killed in the middle leaves no mount and no process.

    python -m cluster.harness.images build [NAME ...]        (with PYTHONPATH=tests)
"""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cluster.harness import host_python, tools
from cluster.harness.manifests import COREDNS_IMAGE
from cluster.harness.node_config import PAUSE_IMAGE
from cluster.harness.processes import ClusterError

REPOSITORY = Path(__file__).parents[3]
BASE_IMAGE = "localhost/streamrl-base:bookworm"
WORKER_IMAGE = "streamrl.test/worker-test:1"
OPERATOR_IMAGE = "streamrl.test/operator:test"
BUILD_S, LOCK_S = 1800.0, 3600.0
DEBIAN = "bookworm"
BASE_PACKAGES = "python3,ca-certificates"
"""The interpreter brings the libraries that one built on this machine needs too: OpenSSL, SQLite, readline, ffi."""
SCRATCH = "scratch-"
USER = 10001
"""As in the images of the project."""
PAUSE = """
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
static void end(int number) { (void)number; _exit(0); }
static void reap(int number) { (void)number; while (waitpid(-1, 0, WNOHANG) > 0) {} }
int main(void) {
  signal(SIGINT, end); signal(SIGTERM, end); signal(SIGCHLD, reap);
  for (;;) pause();
}
"""
PROGRAM = 'FROM scratch\nCOPY program /program\nENTRYPOINT ["/program"]\n'
CONTEXT = (
    "pyproject.toml",
    "requirements",
    "README.md",
    "LICENSE",
    "crds",
    "pages",
    "operator",
    "workers",
    "cli",
    "tools",
)
"""What the project's own images are made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image and how it is made: `fill` puts a Dockerfile and what it needs into an empty folder."""

    name: str
    key: str
    """Hash of all that goes in."""
    fill: Callable[[Path], None] | None = None
    dockerfile: Path | None = None
    """Or a Dockerfile of a checkout, built with the checkout as context."""
    arguments: Mapping[str, str] = field(default_factory=dict)

    @property
    def archive(self) -> Path:
        """Where it lies in the cache."""
        return folder() / f"{self.name.rsplit('/', 1)[-1].replace(':', '-')}-{self.key}.tar"


def folder() -> Path:
    return tools.cache() / "images"


def archive(image: Image) -> Path:
    """Return the image's archive; build it where the cache has none."""
    if not image.archive.exists():
        with _locked():
            if not image.archive.exists():
                _build(image)
    return image.archive


def pause() -> Image:
    """The process that holds a pod's namespaces."""

    def fill(target: Path) -> None:
        (target / "pause.c").write_text(PAUSE)
        _run(["gcc", "-static", "-Os", "-o", str(target / "program"), str(target / "pause.c")])
        (target / "Dockerfile").write_text(PROGRAM + f"USER {USER}:{USER}\n")

    return Image(name=PAUSE_IMAGE, key=_key(PAUSE, PROGRAM), fill=fill)


def coredns() -> Image:
    """CoreDNS, one static program."""
    program = tools.tool("coredns")

    def fill(target: Path) -> None:
        shutil.copy(program, target / "program")
        (target / "Dockerfile").write_text(PROGRAM)

    return Image(name=COREDNS_IMAGE, key=_key(str(program), PROGRAM), fill=fill)


def base() -> Image:
    """Debian with its Python, as the project's Dockerfiles want it."""

    def fill(target: Path) -> None:
        root = target / "root"
        mirror = [os.environ["DEBIAN_MIRROR"]] if "DEBIAN_MIRROR" in os.environ else []
        _run([_program("debootstrap"), "--variant=minbase", f"--include={BASE_PACKAGES}", DEBIAN, str(root), *mirror])
        for left in (
            "var/cache/apt/archives",
            "var/lib/apt/lists",
            "usr/share/doc",
            "usr/share/man",
            "usr/share/locale",
        ):
            shutil.rmtree(root / left, ignore_errors=True)
        (root / "var/cache/apt/archives/partial").mkdir(parents=True)
        (root / "var/lib/apt/lists").mkdir(parents=True)
        _run(["tar", "-C", str(root), "--one-file-system", "-cf", str(target / "root.tar"), "."])
        (target / "Dockerfile").write_text("FROM scratch\nADD root.tar /\nENV PATH=/usr/local/bin:/usr/bin:/bin\n")

    return Image(name=BASE_IMAGE, key=_key(DEBIAN, BASE_PACKAGES), fill=fill)


def worker_test() -> Image:
    """The base, with the places where this machine's Python is mounted (torch stays outside), and what vLLM's CPU build is linked to."""
    paths = host_python.paths()
    made = " ".join(f"'{path}'" for path in paths)
    parents = " ".join(sorted({f"'{parent}'" for path in paths for parent in path.parents if parent != Path("/")}))
    text = (
        f"ARG BASE_IMAGE\nFROM ${{BASE_IMAGE}}\nRUN mkdir -p {made} && chmod a+rx {parents} {made}\n"
        f"RUN apt-get update && apt-get install --yes --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*\n"
        f"RUN echo 'streamrl:x:{USER}:{USER}:streamrl:/tmp:/usr/sbin/nologin' >> /etc/passwd"
        f" && echo 'streamrl:x:{USER}:' >> /etc/group\n"
        f"ENV PATH={host_python.search_path()} PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp\n"
        f"WORKDIR /tmp\nUSER {USER}:{USER}\n"
    )

    def fill(target: Path) -> None:
        (target / "Dockerfile").write_text(text)

    return Image(name=WORKER_IMAGE, key=_key(text, base().key), fill=fill, arguments={"BASE_IMAGE": BASE_IMAGE})


def of_repository(which: str, name: str | None = None, *, checkout: Path = REPOSITORY, **arguments: str) -> Image:
    """The project's own image: `operator`, `generator` or `trainer`; its Dockerfile's arguments as given."""
    dockerfile = checkout / f"Dockerfile.{which}"
    given = sorted(f"{argument}={value}" for argument, value in arguments.items())
    return Image(
        name=name or f"streamrl.test/{which}:test",
        key=_key(dockerfile.read_text(), base().key, _sources(checkout), *given),
        dockerfile=dockerfile,
        arguments={"BASE_IMAGE": BASE_IMAGE, **arguments},
    )


def generator_with_vllm() -> Image:
    """The generator's image with vLLM's CPU build."""
    return of_repository("generator", "streamrl.test/generator-vllm:test", VLLM="cpu")


def drop_layers() -> None:
    """Empty the builder's own store: layers of gigabytes that no other image will have. Archives stay."""
    with _locked():
        if _store().exists():
            shutil.rmtree(_store())


def layers(image: Image) -> list[str]:
    """Digests of the layers of an image in the cache, the base's first."""
    with tarfile.open(archive(image)) as found:
        (manifest,) = json.load(found.extractfile("manifest.json") or io.BytesIO())
        return list(json.load(found.extractfile(manifest["Config"]) or io.BytesIO())["rootfs"]["diff_ids"])


def _sources(checkout: Path) -> str:
    digest = hashlib.sha256()
    for name in CONTEXT:
        top = checkout / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(str(path).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _build(image: Image) -> None:
    begun = time.monotonic()
    sys.stderr.write(f"building image {image.name}\n")
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder()) as scratch:
        context = Path(scratch)
        if "BASE_IMAGE" in image.arguments:
            _have_base()
        if image.fill is not None:
            image.fill(context)
        where = image.dockerfile.parent if image.dockerfile else context
        _buildah("bud", *_flags(image), "--file", str(image.dockerfile or context / "Dockerfile"), str(where))
        half = context / "image.tar"
        _buildah("push", "--quiet", image.name, f"docker-archive:{half}:{image.name}")
        half.rename(image.archive)
    sys.stderr.write(f"built image {image.name} in {time.monotonic() - begun:.0f} s\n")


def _flags(image: Image) -> list[str]:
    certificates = ["--volume", "/etc/ssl/certs:/etc/ssl/certs:ro"] if image.arguments else []
    given = [f"{name}={os.environ[name]}" for name in ("PIP_INDEX_URL", "SSL_CERT_FILE") if name in os.environ]
    pairs = [*(f"{name}={value}" for name, value in image.arguments.items()), *(given if image.dockerfile else [])]
    arguments = [word for pair in pairs for word in ("--build-arg", pair)]
    layers = ["--layers"] if image.dockerfile else []
    return ["--isolation", "chroot", "--network", "host", *layers, *certificates, *arguments, "--tag", image.name]


def _store() -> Path:
    return folder() / "store"


def _have_base() -> None:
    """The builder's own store must know the base; the archive in the cache is the truth."""
    if not base().archive.exists():
        _build(base())
    elif _buildah("inspect", "--type", "image", BASE_IMAGE, check=False).returncode:
        _buildah("pull", "--quiet", f"docker-archive:{base().archive}")


def _buildah(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    where = ["--root", str(_store() / "root"), "--runroot", str(_store() / "run"), "--storage-driver", "overlay"]
    return _run([_program("buildah"), *where, *arguments], check=check)


def _run(argv: list[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run in namespaces that end with the command, or with us."""
    guarded = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--propagation", "private"]
    own = [*guarded, "--pid", "--fork", "--kill-child", "--mount-proc"]
    done = subprocess.run([*own, *argv], capture_output=True, text=True, timeout=BUILD_S, check=False)
    if check and done.returncode:
        said = (done.stdout + done.stderr)[-3000:]
        raise ClusterError(f"{argv[0]} {argv[-1]} ended with {done.returncode}:\n{said}")
    return done


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise ClusterError(f"{name} is missing: apt-get install {name}")
    return found


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """One build at a time, of all processes; the lock goes with its holder."""
    folder().mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + LOCK_S
    with (folder() / ".lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise ClusterError(f"waited {LOCK_S:.0f} s for another process that builds images") from None
                time.sleep(0.2)
        for left in folder().glob(f"{SCRATCH}*"):  # of one that was killed: we alone build now
            shutil.rmtree(left)
        yield


NAMED: dict[str, Callable[[], Image]] = {
    "pause": pause,
    "coredns": coredns,
    "worker-test": worker_test,
    "operator": lambda: of_repository("operator"),
    "generator": lambda: of_repository("generator"),
    "generator-vllm": generator_with_vllm,
    "trainer": lambda: of_repository("trainer"),
}


def main(arguments: list[str]) -> int:
    """Build the named images, or those that every node needs."""
    match arguments:
        case ["build", *names] if set(names) <= set(NAMED):
            for name in names or ["pause", "coredns", "worker-test"]:
                sys.stdout.write(f"{name}\t{archive(NAMED[name]())}\n")
            return 0
    sys.stderr.write(__doc__ or "")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
