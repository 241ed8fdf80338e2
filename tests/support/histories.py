"""Records of possible runs, for tests of the journal."""

from hypothesis import strategies as st

from streamrl_workers.scheduler import records as rec
from support.journals import scored


def plan(first: int, count: int) -> list[rec.Record]:
    return [rec.Planned(group_id=i, prompt_index=i, prompt_key=i + 100) for i in range(first, first + count)]


def step(number: int, groups: tuple[int, ...], *, attempt: int = 1) -> rec.StepTaken:
    return rec.StepTaken(attempt=attempt, step=number, group_ids=groups)


def attempt(number: int, at: int) -> rec.AttemptStarted:
    return rec.AttemptStarted(attempt=number, instance=f"trainer-{number}", step=at)


def failed(group: int) -> rec.Dropped:
    return rec.Dropped(group_id=group, reason="reward_failed")


def equal(group: int, *, mean_tokens: float) -> rec.Dropped:
    return rec.Dropped(group_id=group, reason="zero_variance", mean_tokens=mean_tokens)


@st.composite
def histories(draw: st.DrawFn) -> list[rec.Record]:
    """Records of a possible run: groups are planned, scored, dropped, trained, taken back, covered by checkpoints."""
    records: list[rec.Record] = [attempt(1, 0)]
    planned, ready, taken = 0, [], []
    attempts, step_now, checkpoint = 1, 0, 0
    for event in draw(
        st.lists(st.sampled_from(["plan", "score", "drop", "step", "checkpoint", "restart"]), max_size=40)
    ):
        gone = {group for groups in taken for group in groups}
        waiting = [i for i in range(planned) if i not in ready and i not in gone]
        if event == "plan":
            records += [rec.Planned(group_id=planned, prompt_index=planned, prompt_key=draw(st.integers(0, 3)))]
            planned += 1
        elif event == "score" and waiting:
            group = draw(st.sampled_from(waiting))
            records.append(scored(group, start_version=step_now, tokens=draw(st.integers(1, 9))))
            ready.append(group)
        elif event == "drop" and waiting:
            group = draw(st.sampled_from(waiting))
            records.append(draw(st.sampled_from([failed(group), equal(group, mean_tokens=draw(st.integers(1, 9)))])))
            taken.append([group])  # never again
        elif event == "step" and step_now < frontier(records):
            again = next(r for r in reversed(records) if isinstance(r, rec.StepTaken) and r.step == step_now)
            records.append(step(step_now, again.group_ids, attempt=attempts))
            step_now += 1
        elif event == "step" and ready:
            group = ready.pop()
            taken.append([group])
            records.append(step(step_now, (group,), attempt=attempts))
            step_now += 1
        elif event == "checkpoint" and step_now > checkpoint:
            checkpoint = step_now
            records.append(rec.Checkpointed(step=checkpoint, path="c"))
        elif event == "restart":
            attempts, step_now = attempts + 1, checkpoint
            records.append(attempt(attempts, checkpoint))
    return records


def frontier(records: list[rec.Record]) -> int:
    return max((r.step + 1 for r in records if isinstance(r, rec.StepTaken)), default=0)
