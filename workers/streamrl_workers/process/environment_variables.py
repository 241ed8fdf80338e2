"""Reads a worker's environment variables. Owns the checks of single values; which ones a worker needs is its own."""

import ipaddress
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from streamrl.errors import UserError
from streamrl.keys import (
    ENV_BIND_HOST,
    ENV_CONNECTION_AGE,
    ENV_CPUS,
    ENV_JOB_FILE,
    ENV_SCHEDULER_TLS_NAME,
    ENV_STAY,
    ENV_STORE_DIR,
    ENV_TLS_DIR,
    ENV_TOKEN,
    FILE_JOB,
)
from streamrl_workers.stream.auth import LOOPBACK
from streamrl_workers.stream.tls import AGE_S, Tls

_MOST_PORT = 65_535


def required(environ: Mapping[str, str], key: str) -> str:
    """The value of `key`, which must be there."""
    value = environ.get(key, "")
    if not value:
        raise UserError(
            field=key, rule="must be set in a worker's environment", fix="start workers with `streamrl run`"
        )
    return value


def integer(environ: Mapping[str, str], key: str) -> int | None:
    """The whole number that `key` holds; None if it is not set."""
    text = environ.get(key, "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit():
        raise UserError(field=key, rule="must be a whole number of at least 0", got=text)
    return int(text)


def port(environ: Mapping[str, str], key: str) -> int:
    """The port that `key` holds; 0 (any) if it is not set."""
    number = integer(environ, key) or 0
    if number > _MOST_PORT:
        raise UserError(field=key, rule=f"must be a port from 0 to {_MOST_PORT}", got=number)
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerVariables:
    """What differs between a pod and one machine; the defaults are those of a local run."""

    bind_host: str = LOOPBACK
    token: str = ""
    tls: Tls | None = None
    serve_until_told: bool = False


def worker_variables(environ: Mapping[str, str]) -> WorkerVariables:
    """Where this worker runs. Without certificates there must be a token."""
    tls = certificates(environ)
    return WorkerVariables(
        bind_host=_bind_host(environ),
        token=environ.get(ENV_TOKEN, "") if tls is not None else required(environ, ENV_TOKEN),
        tls=tls,
        serve_until_told=_flag(environ, ENV_STAY),
    )


def job_file(environ: Mapping[str, str], *, run_dir: Path) -> Path:
    """Where the validated job is."""
    return Path(environ.get(ENV_JOB_FILE) or run_dir / FILE_JOB)


def store_dir(environ: Mapping[str, str], *, run_dir: Path) -> Path:
    """What holds checkpoints and the trained model."""
    return Path(environ.get(ENV_STORE_DIR) or run_dir)


def _bind_host(environ: Mapping[str, str]) -> str:
    text = environ.get(ENV_BIND_HOST) or LOOPBACK
    try:
        ipaddress.ip_address(text)
    except ValueError:
        raise UserError(field=ENV_BIND_HOST, rule="must be an IP address", got=text) from None
    return text


def certificates(environ: Mapping[str, str], *, name_key: str = ENV_SCHEDULER_TLS_NAME) -> Tls | None:
    """Of this process; None: it has none. `name_key`: variable with the name that servers must show."""
    directory = environ.get(ENV_TLS_DIR)
    return Tls(Path(directory), age_s=_age_s(environ), server_name=environ.get(name_key, "")) if directory else None


def _age_s(environ: Mapping[str, str]) -> float:
    text = environ.get(ENV_CONNECTION_AGE, "")
    try:
        age_s = float(text) if text else AGE_S
    except ValueError:
        age_s = math.nan
    if not 0 < age_s < math.inf:
        raise UserError(field=ENV_CONNECTION_AGE, rule="must be a number above 0", got=text)
    return age_s


def _flag(environ: Mapping[str, str], key: str) -> bool:
    text = environ.get(key, "")
    if text not in ("", "0", "1"):
        raise UserError(field=key, rule="must be 0 or 1", got=text)
    return text == "1"


def cpus(environ: Mapping[str, str]) -> frozenset[int]:
    """The CPU numbers that `STREAMRL_CPUS` lists; empty if it is not set."""
    parts = [part.strip() for part in environ.get(ENV_CPUS, "").split(",") if part.strip()]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise UserError(field=ENV_CPUS, rule="must be CPU numbers, separated by commas", got=environ[ENV_CPUS])
    return frozenset(int(part) for part in parts)


def pin_to_cpus(environ: Mapping[str, str]) -> None:
    """Pin this thread and those that it starts to `STREAMRL_CPUS`; call it first in `main`. Nothing if it is not set.

    Raises:
        UserError: it names a CPU that this process may not use.
    """
    wanted = cpus(environ)
    if not wanted or not hasattr(os, "sched_setaffinity"):  # only Linux pins
        return
    try:
        os.sched_setaffinity(0, wanted)
    except OSError as error:
        rule = f"must be CPUs that this process may use ({error.strerror})"
        raise UserError(field=ENV_CPUS, rule=rule, got=environ[ENV_CPUS]) from None
