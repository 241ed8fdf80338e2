"""A refactoring of the core changes nothing that it says: twelve worlds, effect by effect, against the file of the last change that was meant."""

from support.core_oracle import differences, tell


def test_the_core_says_what_it_said() -> None:
    runs = tell()
    assert list(differences(runs)) == [], "if it is meant: python -m support.core_oracle write, in tests/, and say why"
    assert all(run.finished for run in runs.values())
    assert {name for name, run in runs.items() if run.core.view().moved_samples} >= {"lending", "moves"}
    kinds = {line.split('"is": "')[1].split('"')[0] for run in runs.values() for line in run.said}
    assert {"AskRanker", "Finished", "PlayTurn", "ScoreSample"} <= kinds
