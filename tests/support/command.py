"""The `streamrl` command in this process."""

from dataclasses import dataclass

import pytest

from streamrl_cli.main import main


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a command did."""

    code: int
    out: list[str]
    err: list[str]


def streamrl(capsys: pytest.CaptureFixture[str], *arguments: str) -> Outcome:
    """Run `streamrl ARGUMENTS...` and take what it wrote."""
    capsys.readouterr()
    code = main(arguments)
    written = capsys.readouterr()
    return Outcome(code=code, out=_lines(written.out), err=_lines(written.err))


def _lines(text: str) -> list[str]:
    """As a terminal has them: `splitlines` would hide some control characters."""
    return text.split("\n")[:-1] if text.endswith("\n") else text.split("\n") if text else []
