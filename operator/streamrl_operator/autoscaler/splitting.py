"""How T_gen follows the number of replicas, by what the run shows of itself.

While samples wait for a slot, all slots are full, and n replicas of m do n/m of the work in the same time. While none
waits, each sample has its slot already: another number of replicas changes the batch alone, a decoding step takes PTL(a n / m) instead of
PTL(a), and the longest answer is not shortened by anything else:

    T_gen(m) = T_gen(n) (w n/m + (1 - w) PTL(a n/m) / PTL(a))

with w the share of the time in which samples wait, and a the mean batch of the rest. Where no PTL is known, all splits evenly.
"""

from streamrl_operator.autoscaler.values import Curve, Pace, inverse


def curve_of(pace: Pace) -> Curve:
    """The curve at this pace."""
    latency, batch, waits = pace.latency, max(pace.batch, 1.0), pace.waits
    if latency is None:
        return inverse

    def predict(t_gen_s: float, replicas: int, others: int) -> float:
        share = replicas / others
        slower = latency.at(batch * share) / latency.at(batch)
        return t_gen_s * (waits * share + (1 - waits) * slower)

    return predict
