"""What added replicas have brought, beside what was predicted: the pool's own measure of its curve.

Work does not always split: one long answer, memory bandwidth or shared cores may set the time of a step. Then another
replica brings little, Δ stays above Δ', and the paper's rule alone would go on to `maxReplicas`.

With I the interval of a step and r the pool's tokens a second, an added replica is expected to speed up by I / (I - Δ'), and
has by r_after / r_before: tokens, since answers grow while a model learns. Their logarithms are summed until a speed-up
of `JUDGED_FROM` was expected, since one replica more in twenty is lost in the noise of a step. If less than `WORTH` of it came,
no more are added until T_gen has grown by `CHANGED`, or a step is overdue by the queue: circumstances are others then.
"""

from dataclasses import replace
from math import exp, log

from streamrl_operator.autoscaler.values import Gains, Pace

WORTH = 0.25
"""Least share of the expected that must come: the paper's elastic run had .8 to .5 of an even split, a step's noise takes some."""
JUDGED_FROM = 1.19
"""Expected speed-up: from 1 to 2, 2 to 3, 3 to 4 or 4 to 5 replicas, from 10 to 12, from 20 to 24."""
CHANGED = 1.5
"""T_gen by T_gen when it was judged; a step's noise is less, mostly."""
_MOST_FALL = 0.5
"""Of an interval: what a second replica takes off where all splits evenly."""


def asked(gains: Gains, *, pace: Pace | None, fall_s: float) -> Gains:
    """A replica is added, and T_gen is predicted to fall by so much."""
    if pace is None or not pace.tokens_per_s:
        return replace(gains, before=None)
    share = min(max(fall_s / pace.interval_s, 0.0), _MOST_FALL)
    return replace(gains, before=pace, newest=-log(1 - share), released_s=None, why="")


def judged(gains: Gains, pace: Pace) -> Gains:
    """The pace with it is known, and whether it is still generation that sets it."""
    if gains.released_s is not None and pace.t_gen_s > gains.released_s:
        return Gains()
    if gains.before is None:
        return gains
    if not gains.before.tokens_per_s or not pace.tokens_per_s or pace.t_gen_s <= pace.t_train_s:
        return replace(gains, before=None)
    expected = gains.expected + gains.newest
    came = gains.came + log(pace.tokens_per_s / gains.before.tokens_per_s)
    if expected < log(JUDGED_FROM):
        return Gains(expected=expected, came=came)
    if came >= WORTH * expected:
        return Gains()
    released_s = CHANGED * pace.t_gen_s
    brought = f"{exp(expected) - 1:.0%} more tokens/s were expected of the last replicas, {exp(came) - 1:+.0%} came"
    return Gains(released_s=released_s, why=f"{brought}: none is added until T_gen exceeds {released_s:.3g} s")
