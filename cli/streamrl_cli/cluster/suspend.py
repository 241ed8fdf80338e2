"""`streamrl suspend JOB`: take the job's pods away, its volumes stay. `streamrl resume JOB`: let it go on from its last checkpoint and journal."""

import argparse

from streamrl.errors import EXIT_DONE, UserError
from streamrl_cli import console
from streamrl_cli.cluster.api import add_connection, connect
from streamrl_cli.cluster.jobs import DELETING, ENDED, state
from streamrl_operator.kube.kinds import RLJOB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("job", metavar="JOB", help="name of the job")
    add_connection(parser)


async def run(args: argparse.Namespace) -> int:
    """Suspend the job, or resume it: write `spec.suspend` of a job that has not ended."""
    suspend = args.command == "suspend"
    word = "suspended" if suspend else "resumed"
    async with connect(args) as cluster:
        job = await cluster.get(RLJOB, args.job)
        if state(job) in (*ENDED, DELETING):
            rule = f"cannot be {word}: it is {state(job)}"
            raise UserError(field=f"rljob/{args.job}", rule=rule, fix="submit it under another name to run it again")
        if bool(job["spec"].get("suspend")) == suspend:
            console.out(f"rljob/{args.job} is {word if suspend else 'not suspended'} already")
            return EXIT_DONE
        await cluster.merge(RLJOB, args.job, {"spec": {"suspend": suspend}})
    then = "its pods go, its volumes stay" if suspend else "its pods are made again"
    console.out(f"rljob/{args.job} {word}: {then}")
    return EXIT_DONE
