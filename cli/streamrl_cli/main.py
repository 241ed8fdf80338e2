"""The `streamrl` command: finds the subcommand, turns a user's mistake into one line and exit code 2.

Owns nothing else. A subcommand is a module with `add_arguments(parser)` and `run(args) -> int`,
plain or async; it is imported when it is called, so that `streamrl validate` starts without what `streamrl run` needs.
"""

import argparse
import asyncio
import errno
import importlib
import logging
import os
import sys
from collections.abc import Coroutine, Sequence
from types import ModuleType
from typing import NoReturn

from streamrl import __version__
from streamrl.errors import EXIT_DONE, EXIT_FAULT, EXIT_USER_ERROR, UserError, UserErrors
from streamrl.text import LineFormatter
from streamrl_cli import console

COMMANDS = {
    "run": "run a job on this machine",
    "validate": "check job files; every mistake is one line",
    "models": "show what works with a family of models",
    "explain": "describe a field of the job file",
    "report": "write report.html of a run",
    "compare": "set runs side by side: reward against steps, tokens, time and cost",
    "ui": "show runs in a browser, while they go on too",
    "journal": "check, show or repair the journal of a run",
    "samples": "look at what a run generated",
    "replay": "train a run again from its samples, and compare the weights",
    "diff": "find the first step in which two runs part, and why",
    "generate": "try a trained model",
    "profile": "measure how fast this machine generates and trains for a job",
    "simulate": "play a scenario in virtual time, with the real scheduler",
    "ranker": "fit or judge a predictor of completion lengths",
    "plan": "show the objects that a job becomes on Kubernetes, with memory and cost",
    "submit": "give a job to a cluster",
    "top": "watch a run, or a job of a cluster, as it goes",
    "status": "jobs of a cluster, or one in detail",
    "logs": "logs of a job's pods",
    "suspend": "take a job's pods away; volumes stay",
    "resume": "let a suspended job go on",
    "scale": "set the size of a generator pool",
    "cancel": "delete a job",
    "cluster": "member clusters: join, list, leave",
}
"""Name -> what it does. The module of a command has its name, but for `MODULES`."""

MODULES = {
    "cluster": "members",
    "profile": "profile_command",
    "resume": "suspend",
    "samples": "samples_command",
    "ui": "command",
}
"""Commands whose module has another name: that of the standard library or of a folder is taken; two are one story."""

PACKAGES = {
    "streamrl_cli.cluster": ("plan", "submit", "status", "logs", "suspend", "resume", "scale", "cancel", "cluster"),
    "streamrl_cli.replaying": ("replay", "diff"),
    "streamrl_cli.reporting": ("report", "samples", "compare"),
    "streamrl_cli.ui": ("ui",),
}
"""Where the modules of commands are that are not in `streamrl_cli` itself."""

_USER_ERRNOS = frozenset(
    {
        errno.ENOENT,
        errno.EACCES,
        errno.EPERM,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EISDIR,
        errno.ENOTDIR,
        errno.EADDRINUSE,
    }
)
"""Failures of the system that the user can mend: no such file, no right, disk full, port in use."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    assert logging.lastResort is not None, "what warns of something in a command has no other handler"
    logging.lastResort.setFormatter(LineFormatter())
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except (UserError, UserErrors) as error:
        console.err(*error.lines)
        return EXIT_USER_ERROR
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAULT
    except OSError as error:
        if error.errno not in _USER_ERRNOS:
            raise
        console.err(f"{error.filename or 'system'}: {error.strerror}")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return console.EXIT_INTERRUPTED


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        console.out(*_help().splitlines())
        return EXIT_DONE if argv else EXIT_USER_ERROR
    if argv[0] == "--version":
        console.out(f"streamrl {__version__}")
        return EXIT_DONE
    command, parser = command_of(argv[0])
    code: int | Coroutine[None, None, int] = command.run(parser.parse_args(argv[1:]))
    return code if isinstance(code, int) else asyncio.run(code)


def command_of(name: str) -> tuple[ModuleType, argparse.ArgumentParser]:
    """Module and parser of a command. Raises `UserError`: there is no such command."""
    if name not in COMMANDS:
        from streamrl.spec.parse import suggest  # a second's work, and needed here alone

        raise UserError(field=f"streamrl {name}", rule="is not a command", fix=suggest(name, COMMANDS))
    package = next((package for package, names in PACKAGES.items() if name in names), "streamrl_cli")
    command = importlib.import_module(f"{package}.{MODULES.get(name, name)}")
    about = (command.__doc__ or "").partition("\n\n")[0].partition(": ")[2]  # the rest is for who reads the code
    parser = _Parser(prog=f"streamrl {name}", description=about)
    parser.set_defaults(command=name)
    command.add_arguments(parser)
    return command, parser


class _Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(field=self.prog, rule=message, fix=f"see `{self.prog} --help`")


def _help() -> str:
    commands = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
    return f"streamrl {__version__}: streamed reinforcement learning of language models\n\nusage: streamrl COMMAND [ARGUMENT...]\n\n{commands}\n\n`streamrl COMMAND --help` says more."


if __name__ == "__main__":
    sys.exit(main())
