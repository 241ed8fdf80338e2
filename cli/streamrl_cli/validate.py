"""`streamrl validate FILE...`: every mistake of job files, and of defaults for jobs, one line each."""

import argparse
from pathlib import Path

from streamrl.errors import EXIT_DONE, EXIT_USER_ERROR, UserErrors
from streamrl.spec_warnings import spec_warnings
from streamrl_cli import console
from streamrl_cli.jobfile import base_dir_of, check_file
from streamrl_cli.local import local_problems, unused_template
from streamrl_cli.model_table import job_warnings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="job file, YAML 1.2 or JSON; several documents are fine"
    )
    parser.add_argument(
        "--spec-only",
        action="store_true",
        help="do not look at this machine (files, packages, functions): the verdict of an API server",
    )


def run(args: argparse.Namespace) -> int:
    """Validate each file; 0 if all are good, else 2."""
    verdicts = [_validate(path, local=not args.spec_only) for path in args.files]
    return EXIT_DONE if all(verdicts) else EXIT_USER_ERROR


def _validate(path: Path, *, local: bool) -> bool:
    jobs, mistakes = check_file(path, check=local_problems if local else None)
    console.err(*UserErrors(mistakes).lines)
    if not mistakes:
        names = ", ".join(job.metadata.name for job in jobs)
        console.out(f"{path}: OK ({names or 'no job'})")
        console.warn(*(f"{path}: {warning}" for job in jobs for warning in spec_warnings(job.spec)))
        if local:
            for check in (job_warnings, unused_template):
                console.warn(*(f"{path}: {line}" for job in jobs for line in check(job, base_dir=base_dir_of(path))))
    return not mistakes
