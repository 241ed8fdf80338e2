"""A run of real processes with kills: the archive and the journal together have every group's samples once, as the journal counts them."""

from collections import Counter
from pathlib import Path

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.journal.check import read_facts
from streamrl_workers.scheduler.journal.sample_store import open_samples
from streamrl_workers.stream.packing import unpack_int32
from support.held_runs import Hold
from support.jobs import simulated_job, write_prompts
from support.runs import LocalRun, streamrl

STEPS = 24


def test_the_archive_is_exact_across_kills_and_a_resumed_run(tmp_path: Path) -> None:
    """Killed are the scheduler, twice, the trainer, which takes steps back, and all at once."""
    write_prompts(tmp_path / "prompts.jsonl")
    job = simulated_job(steps=STEPS)
    job["spec"]["trainer"]["engine"]["simulated"] = {"secondsPerStep": 0.1}
    job["spec"]["algorithm"] = {"dapo": {}}
    job["spec"]["storage"]["checkpoints"] = {"intervalSteps": 2, "keepLast": 1}
    hold = Hold.on(job, tmp_path, step=18)
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    for steps, victim in ((5, "scheduler"), (9, "trainer-0"), (13, "scheduler")):
        run.wait_steps(steps)
        run.kill_one(victim)
    run.wait_steps(18)
    run.kill_all(["scheduler", "trainer-0", "generator-sim-0", "generator-sim-1"])
    assert_exact(run)
    hold.let_go()
    run.resume()
    assert run.wait_end() == 0, run.logs()
    assert run.steps() == STEPS
    archived = assert_exact(run)
    assert archived >= (STEPS - 4) * 4, "what the last checkpoint but one covers is in the archive"
    assert_shown(run)


def assert_exact(run: LocalRun) -> int:
    """What is stored is what the journal counts, and is whole; how many groups the archive has."""
    facts = read_facts(run.folder)
    steps = {group_id: step for step, ids in facts.steps.items() for group_id in ids}
    dropped = {
        group.group_id: group.drop_reason for group in facts.groups.values() if group.drop_reason == "zero_variance"
    }
    assert facts.compacted.steps == 0, "so that the journal still names every group"
    with open_samples(run.folder) as store:
        groups = list(store.groups())
        assert store.account.left_out == 0
        for group in groups:
            assert_whole(group.head, group.read())
    heads = [group.head for group in groups]
    assert max(Counter(head.group_id for head in heads).values()) == 1
    assert {head.group_id: head.step for head in heads if head.HasField("step")} == steps
    found = {head.group_id: head.drop_reason for head in heads if head.drop_reason}
    assert {group_id: reason for group_id, reason in found.items() if reason == "zero_variance"} == dropped
    return sum(not isinstance(group.source, pb.ArchivedSamples) for group in groups)


def assert_whole(head: pb.ArchivedGroup, stored: pb.ArchivedSamples) -> None:
    """All that training of it needed, and its texts."""
    assert [sample.sample_index for sample in stored.samples] == [0, 1, 2, 3]
    for sample, known, written in zip(stored.samples, head.samples, stored.texts.samples, strict=True):
        count = len(unpack_int32(sample.tokens))
        assert count == known.tokens == len(sample.logprobs) // 4 == sum(span.tokens for span in sample.spans)
        assert sample.reward == known.reward == float(written.turns[0] == stored.texts.prompt)
        assert sample.prompt_tokens


def assert_shown(run: LocalRun) -> None:
    """By the command, of an old step and of the newest."""
    for step in (0, STEPS - 1):
        shown = streamrl("samples", str(run.folder), "--step", str(step), "--best")
        assert (shown.returncode, shown.stderr) == (0, ""), shown
        assert shown.stdout.startswith(f"best: step {step}, group "), shown.stdout
        assert "prompt     | question " in shown.stdout
