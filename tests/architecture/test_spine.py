"""The spine of the scheduler's core names no feature that only some jobs have: each is a guest in `extensions/`."""

import re
from collections import Counter

from support.public_names import words_of
from support.tree import ROOT

SCHEDULER = ROOT / "workers/streamrl_workers/scheduler"
SPINE = (
    "core",
    "delivery",
    "effects",
    "evaluation",
    "generators",
    "history",
    "model",
    "planning",
    "records",
    "rollout",
    "sample",
    "views",
    "weights",
)
MOST_LINES = 700
FEATURES = (
    r"archer",
    r"by number",
    r"colocated?",
    r"demonstrat\w*",
    r"distill?\w*",
    r"draws? per step",
    r"dynamic sampling",
    r"frozen(?! true)",  # of a dataclass
    r"held out (?:rows?|samples?|loss)",
    r"iql",
    r"judges?",
    r"lending",
    r"lent",
    r"logical",
    r"lora",
    r"mixtures?",
    r"rankers?",
    r"ranked",
    r"rebalanc\w*",
    r"reference (?:pool|logprobs)",
    r"replayed",
    r"resampl\w*",
    r"sherl",
    r"supervis\w*",
    r"tba",
    r"trajectory balance",
    r"turn states?",
    r"uplink",
    r"zero variance",
)
"""Words of features, as they stand in names and in prose: `ByNumber`, `by_number` and "by number" are one."""
ALLOWED = {
    ("core", "ranked"): 2,  # the event `prompts_ranked`, which the shell calls
    ("core", "ranker"): 1,  # the effect that it answers
    ("effects", "ranker"): 3,  # the effect `AskRanker`, which the shell carries out
    ("effects", "ranked"): 1,
    ("model", "zero variance"): 3,  # a reason of drops in journal and metrics
    ("views", "zero variance"): 1,
    ("model", "resampled"): 1,  # a field of the protocol's `Sample`
    ("rollout", "resampled"): 1,
    ("sample", "reference logprobs"): 1,
}
"""(module, words) -> how often it names them, with the reason; the numbers only fall."""
_FEATURE = re.compile(rf"\b(?:{'|'.join(FEATURES)})\b")


def features_in(text: str) -> Counter[str]:
    """Return how often each feature is named."""
    return Counter(_FEATURE.findall(" ".join(words_of(text))))


def test_the_spine_names_no_feature() -> None:
    found = {
        (module, words): count
        for module in SPINE
        for words, count in features_in((SCHEDULER / f"{module}.py").read_text(encoding="utf-8")).items()
    }
    assert found == ALLOWED


def test_how_a_feature_is_named() -> None:
    text = "class ByNumber: settings.by_number  # groups by number; @dataclass(frozen=True) ScoreSample the frozen pool"
    assert features_in(text) == {"by number": 3, "frozen": 1}


def test_no_file_of_the_spine_is_too_long() -> None:
    lengths = {module: len((SCHEDULER / f"{module}.py").read_text(encoding="utf-8").splitlines()) for module in SPINE}
    assert {module: lines for module, lines in lengths.items() if lines > MOST_LINES} == {}
