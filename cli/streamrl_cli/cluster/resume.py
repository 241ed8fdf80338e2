"""`streamrl resume JOB`: let a suspended job go on from its last checkpoint and journal."""

import argparse
import asyncio

from streamrl_cli.cluster.suspend import add_arguments, set_suspend

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Resume the job."""
    return asyncio.run(set_suspend(args, suspend=False))
