"""`streamrl replay RUN`: trains a run again from its samples, and compares each version with the run's by its hash.

The initial model, the order of the groups and the micro-steps are the run's. Nothing is generated, and nothing of the run is changed.
On a machine like the run's every hash is the same: then the samples in the archive are those that made the weights.
Exit code 0: all are the same; 1: one differs, and the first that does is named; 2: the run cannot be replayed or compared, whatever the cause.
"""

import argparse
import asyncio
import shutil
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, closing
from pathlib import Path

from streamrl import keys
from streamrl.errors import EXIT_DONE, EXIT_FAULT, EXIT_USER_ERROR, UserError
from streamrl.spec import RLJob
from streamrl.spec.training import HttpWeights, Weights
from streamrl_cli import console
from streamrl_cli.replaying.history import read_history
from streamrl_cli.runner.folder import RunFolder, create_folder, open_code, private_files
from streamrl_cli.runner.lone_trainer import start_lone_trainer
from streamrl_cli.runner.prepare import prepare_model
from streamrl_cli.runner.workers import RunFailedError, failed
from streamrl_workers.plugins.sources import code_fingerprint
from streamrl_workers.scheduler.journal.check import store_of
from streamrl_workers.scheduler.journal.fingerprint import read_fingerprint
from streamrl_workers.scheduler.journal.store import open_for_reading

_PROCESS = "streamrl_cli.replaying.retrain"
_VERSION_S = 4 * 3600.0
"""For one version: a large model takes minutes to load, and a step of it may take an hour; a hung one must still end."""
_SHOWN_CHARS = 16
"""Of a hash."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `streamrl replay`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--to-step", type=int, metavar="N", help="the first N steps (default: all that are recorded)")


def run(args: argparse.Namespace) -> int:
    """Train again, compare."""
    if args.to_step is not None and args.to_step < 1:
        raise UserError(field="--to-step", rule="must be at least 1", got=args.to_step)
    source = open_code(args.run)
    if source.job.spec.trainer.nodes > 1:
        raise UserError(field="spec.trainer.nodes", rule="must be 1 to be replayed", got=source.job.spec.trainer.nodes)
    _check_code(source)
    hashes = _hashes(source.path, end=args.to_step)
    with private_files() as umask:
        place = Path(tempfile.mkdtemp(prefix="streamrl-replay-"))
        names_a_log = False
        try:
            return asyncio.run(_replay(hashes, source=source, place=place, umask=umask))
        except RunFailedError as failure:
            console.err(f"streamrl: {failure}")
            names_a_log = failure.exit_code != EXIT_USER_ERROR
            return EXIT_USER_ERROR  # also of a fault: 1 says that a hash differs
        finally:
            if not names_a_log:
                shutil.rmtree(place)


def _check_code(source: RunFolder) -> None:
    """Raise `UserError`: a plug-in of the run has other code now than its journal was written with."""
    found = code_fingerprint(source.job.spec, directory=source.base_dir)
    with closing(open_for_reading(source.file(keys.FILE_JOURNAL))) as connection:
        recorded = read_fingerprint(connection) or {}
    for field, code in found.items():
        if recorded.get(field, code) != code:
            rule = f"the code has changed since the journal was written; recorded: {recorded[field]}; now: {code}"
            raise UserError(field=field, rule=rule, fix="put the code back")


def _hashes(run_dir: Path, *, end: int | None) -> list[bytes]:
    """Return the hash of every version up to the last that can be compared; empty: the run has not recorded it.

    Nothing else is kept: the trainer reads the samples itself. Raises `UserError`: the last step, or the one asked for, cannot be compared.
    """
    history = read_history(run_dir, end=end)
    hashes = [history.hash_of(version) for version in range(len(history.steps) + 1)]
    last = max((version for version, found in enumerate(hashes) if found), default=0)
    if last == 0 or (end is not None and last < end):
        got = {} if end is None else {"got": end}
        fix = (
            f"name at most {last}" if last else "let the run go on: the version of a step is recorded with the next one"
        )
        raise UserError(field="--to-step", rule="must be a step whose version the run has recorded", fix=fix, **got)
    return hashes[: last + 1]


async def _replay(hashes: Sequence[bytes], *, source: RunFolder, place: Path, umask: int) -> int:
    folder = create_folder(_for_replay(source.job), base_dir=source.base_dir, parent=place, path=place / source.name)
    store = store_of(source.path)
    model = (
        ""
        if not source.job.spec.has_model
        else await prepare_model(
            folder, report=lambda _: None, say=console.err, umask=umask, store=None if store == source.path else store
        )
    )
    version = 0
    steps = len(hashes) - 1
    retrained = _versions(str(source.path), str(steps), folder=folder, model=model)
    async with aclosing(retrained) as versions:  # the trainer ends with it
        async for found in versions:
            said = hashes[version]
            if said and said.hex() != found:
                console.out(_difference(version, run=said.hex(), here=found))
                return EXIT_FAULT
            console.out(f"version {version}  {found[:_SHOWN_CHARS]}  {'same' if said else 'not recorded'}")
            version += 1
    unknown = [version for version, found in enumerate(hashes) if not found]
    but = f" but {', '.join(map(str, unknown))}, which the run has not recorded" if unknown else ""
    console.out(f"compared steps 1 to {steps}{but}: all are the same")
    return EXIT_DONE


def _for_replay(job: RLJob) -> RLJob:
    """Return the job as it is replayed: its versions go to no folder, as no generator asks for them."""
    return job.model_copy(update={"spec": job.spec.model_copy(update={"weights": Weights(http=HttpWeights())})})


def _difference(version: int, *, run: str, here: str) -> str:
    hashes = f"{run[:_SHOWN_CHARS]} in the run, {here[:_SHOWN_CHARS]} here"
    cause = "the initial model is another one" if version == 0 else f"step {version - 1} came out otherwise"
    return f"version {version} differs: {hashes}; {cause}"


async def _versions(*arguments: str, folder: RunFolder, model: str) -> AsyncGenerator[str]:
    """Hash of each version, in hexadecimal. Raises `RunFailedError`: the trainer has failed, or takes too long."""
    log = folder.file(keys.DIR_LOGS, "trainer-0.log")
    async with start_lone_trainer(folder, _PROCESS, *arguments, model=model) as process:
        assert process.stdout is not None, "it is a pipe"
        while True:
            try:
                async with asyncio.timeout(_VERSION_S):
                    line = await process.stdout.readline()
            except TimeoutError:
                raise RunFailedError(f"the trainer made no version within {_VERSION_S:g} s; see {log}") from None
            if not line:
                break
            yield line.decode().strip()
        code = await process.wait()
        if code != EXIT_DONE:
            raise failed(reason=f"the run could not be replayed (exit code {code})", exit_code=code, log=log)
