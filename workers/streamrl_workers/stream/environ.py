"""Reads a worker's environment variables. Owns the checks of single values; which ones a worker needs is its own."""

from collections.abc import Mapping

from streamrl.errors import UserError

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
