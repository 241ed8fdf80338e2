"""The core's answers follow from its events alone: processes that order sets and protobuf maps differently say the same, effect by effect."""

import os
import subprocess
import sys

from support.tree import ROOT

SCRIPT = """
import hashlib
from random import Random
from streamrl.spec.scheduling import Rebalance, SkewAware
from support.core_world import World, settings
from support.known_lengths import KnownLengths

class Told(World):
    said = hashlib.sha256()

    def do(self, effects):
        self.said.update(repr(effects).encode())
        super().do(effects)

often = Rebalance.model_validate({"maxMoves": 5})
for dispatch, options in (("longestFirst", None), ("skewAware", SkewAware()), ("auto", None)):
    job = settings(dispatch=dispatch, dispatch_options=options, batch_groups=12, max_turns=2, steps=8, rebalance=often)
    run, chance, names = Told(job, slots=(5, 2, 3), lengths=KnownLengths()), Random(5), "abcdefgh"
    run.start_trainer()
    for turn in range(60):
        name = names[turn % len(names)]
        if turn % 5 or name not in run.generators:
            run.join_generator(name)
        else:
            run.kill_generator(name)
        run.progress_some(chance, pace=0.7, finish=0.2)
        run.do(run.core.tick(run.now_s + turn))
print(Told.said.hexdigest())
"""


def test_the_order_of_sets_decides_nothing() -> None:
    said = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT / "tests")},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        ).stdout
        for seed in "1234"
    }
    assert len(said) == 1
