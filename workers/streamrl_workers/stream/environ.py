"""Reads a worker's environment variables. Owns the checks of single values; which ones a worker needs is its own."""

import os
from collections.abc import Mapping

from streamrl.errors import UserError
from streamrl.keys import ENV_CPUS

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
