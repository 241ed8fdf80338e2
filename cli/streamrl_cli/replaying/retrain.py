"""The process that trains a run again: `python -m streamrl_cli.replaying.retrain RUN STEPS`.

Consumes the environment of a trainer's rank 0 (folder with the job, model, threads, cores) and the samples of RUN. Produces the hash of each
version, in hexadecimal, a line each on standard output, from version 0 on. A user's mistake is one line on standard error and
exit code 2, a lost rank one and exit code 75. It ends at once when its parent is gone. Other ranks are the trainer's own (`python -m streamrl_workers.trainer`).
"""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from streamrl.errors import EXIT_DONE, EXIT_RETRY, EXIT_USER_ERROR, UserError, UserErrors
from streamrl.proto import stream_pb2 as pb
from streamrl_cli import console
from streamrl_cli.replaying.history import HistoryStep, read_history
from streamrl_workers.process.environment_variables import pin_to_cpus
from streamrl_workers.process.shutdown import watch_parent
from streamrl_workers.trainer.engines import create_engine
from streamrl_workers.trainer.engines.engine import RetryError, TrainEngine
from streamrl_workers.trainer.engines.process_group import ProcessGroup
from streamrl_workers.trainer.engines.setup import EngineSetup
from streamrl_workers.trainer.rank_weights import NO_PARTS, RankParts, rank_parts
from streamrl_workers.trainer.settings import read_settings
from streamrl_workers.weights.store import WeightStore


def main(argv: Sequence[str]) -> int:
    """Train again, tell hashes; the exit code."""
    run_dir, steps = argv
    output = console.own_output()
    try:
        pin_to_cpus(os.environ)
        watch_parent(os.environ)
        history = read_history(Path(run_dir), end=int(steps))
        settings = read_settings(os.environ)
        ranks = ProcessGroup(settings.rendezvous)
        try:
            setup = EngineSetup(
                spec=settings.spec,
                model_path=settings.model_path,
                base_dir=settings.base_dir,
                plugin_dir=settings.plugin_dir,
                threads=settings.threads,
                env=settings.env,
                ranks=ranks.gather(),
            )
            engine = create_engine(setup)
            for version_hash in retrain(engine, history.steps, parts=rank_parts(settings, ranks=ranks)):
                output.write(f"{version_hash.hex()}\n")
                output.flush()
        finally:
            ranks.end()
    except (UserError, UserErrors) as error:
        console.err(*error.lines)
        return EXIT_USER_ERROR
    except RetryError as error:
        console.err(str(error))
        return EXIT_RETRY
    return EXIT_DONE


def retrain(engine: TrainEngine, steps: Sequence[HistoryStep], *, parts: RankParts = NO_PARTS) -> Iterator[bytes]:
    """Take the steps as they were taken, with the same micro-steps and passes; the hash of the version that each begins with, then of the last one."""
    weights = WeightStore(newest_kept=1)

    def published(attempt: int, step: int) -> bytes:
        slices = engine.slices(attempt=attempt, step=step)
        return weights.publish(
            attempt=attempt,
            step=step,
            tensors=engine.probe(),
            slices=slices,
            parts=lambda: parts.ask(attempt=attempt, step=step),
        ).hash

    for taken in steps:
        yield published(taken.attempt, taken.step)
        _take(engine, taken)
    yield published(0, len(steps))


def _take(engine: TrainEngine, taken: HistoryStep) -> None:
    engine.begin_step(taken.step, attempt=taken.attempt, cuts=taken.cuts)
    for count, group in enumerate(taken.groups, start=1):
        samples = group.read().samples
        engine.add([pb.Group(group_id=group.head.group_id, step=taken.step, samples=samples)])
        # A micro-step of the run had the least that an idle trainer begins with, or more.
        if count in taken.micro_steps and not engine.advance(idle=True):
            rule = f"has a micro-step behind group {count} that nothing waits for"
            raise UserError(field=f"step {taken.step}", rule=rule, fix="replay it with the job that the run had")
    engine.finish_step()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
