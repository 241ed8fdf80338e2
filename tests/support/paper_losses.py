"""Each algorithm's loss in plain loops over tokens, written from the papers alone; shares no code with the algorithms."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.packing import unpack_float32, unpack_int32

MAX_TOKENS = 64
TEMPERATURE = 0.8
REPLAYED = 1 << 63
"""Groups from here on are of the replay buffer."""


@dataclass(kw_only=True)
class Seen:
    """A sample as the loops see it; all lists are of the tokens that the model drew."""

    group: int
    reward: float
    policy: list[torch.Tensor]  # float64 scalars with gradient
    behaviour: list[float]
    reference: list[float]
    values: list[torch.Tensor]
    states: list[torch.Tensor]  # two values of the text before each token, and two of the text that ends with it
    utterances: list[torch.Tensor]
    copied: list[tuple[list[float], list[float]]]  # the same of the critic's copy
    ends: dict[int, float]  # token at which a turn ends -> the turn's reward
    contexts: list[tuple[int, int]]  # first and last + 1 of the tokens of each conversation
    longest: int = 0
    resampled: bool = False  # a turn drawn anew, whose reward nobody knows


def conversations(trajectory: pb.Sample) -> list[tuple[list[int], list[pb.Segment], int]]:
    """Each by itself: its prompt, the segments behind it, where these begin among the sample's tokens."""
    tokens, place = list(unpack_int32(trajectory.tokens)), 0
    found: list[tuple[list[int], list[pb.Segment], int]] = [(list(unpack_int32(trajectory.prompt_tokens)), [], 0)]
    for segment in trajectory.segments or [pb.Segment(tokens=len(tokens))]:
        if segment.context:
            found.append((tokens[place : place + segment.tokens], [], place + segment.tokens))
        else:
            found[-1][1].append(segment)
        place += segment.tokens
    return found


def look(trajectory: pb.Sample, models: dict[str, torch.nn.Module], *, temperature: float = TEMPERATURE) -> Seen:
    seen = Seen(
        group=trajectory.group_id,
        reward=trajectory.reward,
        policy=[],
        behaviour=[],
        reference=[],
        values=[],
        states=[],
        utterances=[],
        copied=[],
        ends={},
        contexts=[],
        resampled=trajectory.resampled,
    )
    for prompt, segments, begin in conversations(trajectory):
        first = len(seen.policy)
        listen(seen, prompt, segments, trajectory, begin, models, temperature)
        seen.contexts.append((first, len(seen.policy)))
    return seen


def listen(
    seen: Seen, prompt: list[int], segments: list[pb.Segment], trajectory: pb.Sample, begin: int, models, temperature
) -> None:
    """Add a conversation, as the models see it when there is nothing else."""
    tokens = list(unpack_int32(trajectory.tokens))[begin : begin + sum(segment.tokens for segment in segments)]
    behaviour = unpack_float32(trajectory.logprobs)[begin:]
    inputs = torch.tensor([prompt + tokens])
    policy = torch.log_softmax(models["policy"](input_ids=inputs).logits[0] / temperature, -1)
    with torch.no_grad():
        reference = torch.log_softmax(models["reference"](input_ids=inputs).logits[0] / temperature, -1)
    critic = models["critic"]
    values = critic.head(critic.body(input_ids=inputs).last_hidden_state)[0]
    copied = None
    if hasattr(critic, "target"):
        copied = critic.target.head(critic.target.body(input_ids=inputs).last_hidden_state)[0].tolist()
    place = 0
    for segment in segments:
        for _ in range(segment.tokens):
            if not segment.observation:
                row = len(prompt) + place - 1
                seen.policy.append(policy[row, tokens[place]])
                seen.reference.append(float(reference[row, tokens[place]]))
                seen.behaviour.append(behaviour[place])
                seen.values.append(values[row, 0])
                if copied is not None:
                    seen.states.append(values[row, :2])
                    seen.utterances.append(values[row + 1, 2:])
                    seen.copied.append((copied[row][:2], copied[row + 1][2:]))
            place += 1
        if not segment.observation:
            seen.longest = max(seen.longest, segment.tokens)
            seen.ends[len(seen.policy) - 1] = segment.reward


@dataclass(frozen=True, kw_only=True)
class Case:
    """A rule with its constants, and what the paper says of it."""

    rule: str
    algorithm: dict[str, Any]
    correction: str = "twoSidedClip"
    level: str | None = None
    least: float = 0.0
    cap: float = 5.0
    low: float = 0.2
    high: float = 0.2

    @property
    def constants(self) -> dict[str, Any]:
        """Of the correction, in the words of the job file."""
        if self.correction == "m2po":
            return {"threshold": self.cap}
        level = {} if self.level is None else {"level": self.level}
        if self.correction == "maskedImportance":
            return {**level, "low": self.least, "high": self.cap}
        return {**level, "cap": self.cap}

    @property
    def temperature(self) -> float:
        """At which log-probs are."""
        return 1.0 if self.rule == "supervised" else TEMPERATURE

    @property
    def kl(self) -> dict[str, Any] | None:
        return self.algorithm.get("referenceKl")


def bounded(ratio: torch.Tensor, advantage: float, low: float, high: float, cap: float) -> torch.Tensor:
    """PPO's clip, the dual clip beside it, case by case."""
    if advantage >= 0:
        return (ratio if ratio.item() < high else torch.tensor(high).double()) * advantage
    if ratio.item() < low:
        return torch.tensor(low).double() * advantage
    return (ratio if ratio.item() < max(cap, high) else torch.tensor(max(cap, high)).double()) * advantage


def surrogate(policy, behaviour, proximal, advantage, case: Case, whole: float, kept: bool = True) -> torch.Tensor:
    """Of one ratio under each of the corrections; `whole`: proximal / behaviour of the whole sequence; `kept`: by m2po."""
    low, high, cap = 1 - case.low, 1 + case.high, case.cap
    if case.correction == "twoSidedClip":
        return -bounded(torch.exp(policy - behaviour), advantage, low, high, cap)
    weight = whole if case.level == "Sequence" else math.exp(proximal - behaviour)
    if case.correction == "truncatedImportance":
        weight = min(weight, cap)
    elif case.correction == "m2po":
        weight = weight if kept else 0.0
    elif weight > cap or (case.correction == "maskedImportance" and weight < case.least):
        weight = 0.0
    return -weight * bounded(torch.exp(policy - proximal), advantage, low, high, math.inf)


def far_tokens(seen: list[Seen], case: Case) -> set[tuple[int, int]]:
    """Samples and tokens that M2PO masks: the farthest first, until the mean square of the rest is at most the threshold."""
    if case.correction != "m2po":
        return set()
    left = {(i, t): (p.item() - s.behaviour[t]) ** 2 for i, s in enumerate(seen) for t, p in enumerate(s.policy)}
    gone = set()
    while left and sum(left.values()) / len(left) > case.cap:
        farthest = max(left, key=left.__getitem__)
        gone.add(farthest)
        del left[farthest]
    assert gone
    assert left
    return gone


def ratios_of(s: Seen) -> list[float]:
    """For each token that of the whole conversation which it is of."""
    found: list[float] = []
    for begin, end in s.contexts:
        ratio = 1.0
        for p, b in zip(s.policy[begin:end], s.behaviour[begin:end], strict=True):
            ratio *= math.exp(p.item() - b)
        found += [ratio] * (end - begin)
    return found


def estimate(kind: str, policy: torch.Tensor, reference: float) -> torch.Tensor:
    d = policy - reference
    return {"K1": lambda: d, "K2": lambda: d * d / 2, "K3": lambda: torch.exp(-d) - 1 + d}[kind]()


def group_advantages(seen: list[Seen], kind: Callable[[list[float]], list[float]], rewards=None) -> list[float]:
    rewards = rewards or [s.reward for s in seen]
    found = [0.0] * len(seen)
    for group in {s.group for s in seen}:
        members = [i for i, s in enumerate(seen) if s.group == group]
        for member, advantage in zip(members, kind([rewards[i] for i in members]), strict=True):
            found[member] = advantage
    return found


def standardised(rewards: list[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [(r - mean) / (deviation + 1e-6) for r in rewards]


def centred(rewards: list[float]) -> list[float]:
    return [r - sum(rewards) / len(rewards) for r in rewards]


def left_out(rewards: list[float]) -> list[float]:
    return [r - sum(rewards[:i] + rewards[i + 1 :]) / (len(rewards) - 1) for i, r in enumerate(rewards)]


def shaped(seen: list[Seen], buffer: int, penalty: float) -> list[float]:
    """Equation 13 of DAPO, case by case."""
    rewards = []
    for s in seen:
        if s.longest <= MAX_TOKENS - buffer:
            rewards.append(s.reward)
        elif s.longest <= MAX_TOKENS:
            rewards.append(s.reward + penalty * ((MAX_TOKENS - buffer) - s.longest) / buffer)
        else:
            rewards.append(s.reward - penalty)
    return rewards


def expected_group_loss(case: Case, seen: list[Seen], samples: int) -> torch.Tensor:
    if case.rule == "dapo" and "overlong" in case.algorithm:
        overlong = case.algorithm["overlong"]
        rewards = shaped(seen, overlong["bufferTokens"], overlong["penalty"])
        advantages = group_advantages(seen, standardised, rewards)
    elif case.rule == "rloo":
        advantages = group_advantages(seen, left_out)
    elif case.rule == "drGrpo" or case.algorithm.get("normalizeStd") is False:
        advantages = group_advantages(seen, centred)
    else:
        advantages = group_advantages(seen, standardised)
    sums: list[torch.Tensor] = []
    distils = case.rule == "distillation"
    rewarded = case.algorithm.get("rewardWeight", 0.0) if distils else 1.0
    learning = [i for i, a in enumerate(advantages) if a != 0 or case.kl or distils]  # others have no pass
    gone = {(learning[i], t) for i, t in far_tokens([seen[i] for i in learning], case)}
    for i, (s, advantage) in enumerate(zip(seen, advantages, strict=True)):
        total = torch.zeros((), dtype=torch.float64)
        whole = ratios_of(s)
        for begin, end in s.contexts if case.rule == "gspo" else ():
            n = end - begin
            policy, behaviour = sum(s.policy[begin:end]) / n, sum(s.behaviour[begin:end]) / n
            total = total + n * surrogate(policy, behaviour, policy.item(), advantage, case, whole[begin])
        for token, policy in enumerate(s.policy):
            if case.rule != "gspo":
                kept = (i, token) not in gone
                own = rewarded * advantage + (s.reference[token] - policy.item() if distils else 0.0)
                total = total + surrogate(policy, s.behaviour[token], policy.item(), own, case, whole[token], kept)
            if case.kl:
                total = total + case.kl["coefficient"] * estimate(case.kl["estimator"], policy, s.reference[token])
        sums.append(total)
    if case.rule == "drGrpo":
        return sum(sums) / (samples * MAX_TOKENS)
    if case.rule in ("dapo", "distillation") or case.algorithm.get("aggregation") == "TokenMean":
        return sum(sums) / sum(len(s.policy) for s in seen)
    if case.rule == "rloo":
        return sum(sums) / len(seen)
    return sum(total / len(s.policy) for total, s in zip(sums, seen, strict=True)) / len(seen)


def balance(seen: list[Seen], beta: float) -> torch.Tensor:
    """beta / 2 times the VarGrad loss of the TBA paper."""
    total = torch.zeros((), dtype=torch.float64)
    for group in {s.group for s in seen}:
        members = [s for s in seen if s.group == group]
        gaps = [sum(s.policy) - sum(s.reference) - s.reward / beta for s in members]
        log_z = -sum(gap.item() for gap in gaps) / len(gaps)
        for s, gap in zip(members, gaps, strict=True):
            for begin, end in s.contexts:  # each pulls its own tokens by the whole sample's gap
                drawn = sum(s.policy[begin:end])
                total = total + (log_z + gap.detach() + drawn - drawn.detach()) ** 2
    return beta / 2 * total / len(seen)


def hierarchical(case: Case, seen: list[Seen]) -> tuple[torch.Tensor, torch.Tensor]:
    """The actor's and the critic's loss of ArCHer, utterance by utterance."""
    actor = errors = torch.zeros((), dtype=torch.float64)
    terms, episodes = 0, [s for s in seen if s.group < REPLAYED]
    for s in seen:
        rewards = [s.ends.get(token, 0.0) for token in range(len(s.policy))]
        rewards[-1] += s.reward - sum(s.ends.values())
        if case.kl:
            for token, (p, r) in enumerate(zip(s.policy, s.reference, strict=True)):
                rewards[token] -= case.kl["coefficient"] * estimate(case.kl["estimator"], p, r).item()
        first, whole = 0, ratios_of(s)
        for last in sorted(s.ends):
            done = last == len(s.policy) - 1
            advantage = min(s.utterances[last].tolist()) - min(s.states[first].tolist())
            for head in (0, 1):
                ahead = 0.0 if done else s.copied[last + 1][0][head]
                target = sum(rewards[first : last + 1]) + case.algorithm.get("discount", 0.9) * ahead
                if not s.resampled:
                    errors = errors + (s.utterances[last][head] - target) ** 2 / 2
                if s.group < REPLAYED:
                    errors = errors + (s.states[first][head] - s.copied[last][1][head]) ** 2 / 2
            terms += 4 if s.group < REPLAYED and not s.resampled else 2
            for token in range(first, last + 1) if s.group < REPLAYED else ():
                policy = s.policy[token]
                actor = actor + surrogate(policy, s.behaviour[token], policy.item(), advantage, case, whole[token])
            first = last + 1
    return actor / len(episodes), errors / terms


def implicit(case: Case, seen: list[Seen]) -> tuple[torch.Tensor, torch.Tensor]:
    """The policy's and the critic's loss of IQL, utterance by utterance."""
    said = {"discount": 0.9, "expectile": 0.7, "beta": 0.5, "most": 20.0} | case.algorithm["weights"]["critic"]
    policy = errors = torch.zeros((), dtype=torch.float64)
    utterances = tokens = 0
    weights = set()
    for s in seen:
        first, paid = 0, 0.0
        for last in sorted(s.ends):
            done = last == len(s.policy) - 1
            earned = s.reward - paid if done else s.ends[last]
            paid += earned
            for head in (0, 1):
                ahead = 0.0 if done else s.copied[last + 1][0][head]
                errors = errors + (s.utterances[last][head] - earned - said["discount"] * ahead) ** 2 / 2
                better = s.copied[last][1][head] - s.states[first][head]
                errors = errors + (said["expectile"] if better > 0 else 1 - said["expectile"]) * better**2
            advantage = min(s.utterances[last].tolist()) - min(s.states[first].tolist())
            weight = min(math.exp(advantage / said["beta"]), said["most"])
            weights.add(weight)
            for token in range(first, last + 1):
                policy = policy - weight * s.policy[token]
                tokens += 1
            utterances += 1
            first = last + 1
    assert len(weights - {said["most"]}) > 1
    return policy / tokens, errors / (4 * utterances)


def expected_batch_losses(case: Case, seen: list[Seen]) -> tuple[torch.Tensor, torch.Tensor]:
    """Policy and value loss of a single update over the whole batch."""
    if case.rule == "trajectoryBalance":
        return balance(seen, case.algorithm["beta"]), torch.zeros(())
    if case.rule == "archer":
        return hierarchical(case, seen)
    if case.rule == "supervised":
        return implicit(case, seen)
    discount, lam = case.algorithm.get("discount", 1.0), case.algorithm.get("gaeLambda", 1.0)
    raw: list[float] = []
    targets: list[float] = []
    for s in seen:
        rewards = [s.ends.get(token, 0.0) for token in range(len(s.policy))]
        rewards[-1] += s.reward - sum(s.ends.values())
        if case.kl:
            pulls = [estimate(case.kl["estimator"], p, r) for p, r in zip(s.policy, s.reference, strict=True)]
            rewards = [r - case.kl["coefficient"] * pull.item() for r, pull in zip(rewards, pulls, strict=True)]
        n, values = len(rewards), [*(v.item() for v in s.values), 0.0]
        for t in range(n):
            if case.rule == "reinforcePP":
                raw.append(sum(discount ** (k - t) * rewards[k] for k in range(t, n)))
                continue
            deltas = [rewards[k] + discount * values[k + 1] - values[k] for k in range(n)]
            raw.append(sum((discount * lam) ** (k - t) * deltas[k] for k in range(t, n)))
            targets.append(raw[-1] + values[t])
    mean = sum(raw) / len(raw)
    deviation = math.sqrt(sum((a - mean) ** 2 for a in raw) / len(raw))
    advantages = [(a - mean) / (deviation + 1e-8) for a in raw]
    tokens = [token for s in seen for token in zip(s.policy, s.behaviour, ratios_of(s), strict=True)]
    gone = far_tokens(seen, case)
    kept = [(i, t) not in gone for i, s in enumerate(seen) for t in range(len(s.policy))]
    losses = [
        surrogate(p, b, p.item(), a, case, whole, is_kept)
        for (p, b, whole), a, is_kept in zip(tokens, advantages, kept, strict=True)
    ]
    values = [v for s in seen for v in s.values]
    errors = [(v - g) ** 2 / 2 for v, g in zip(values, targets, strict=False)]
    return sum(losses) / len(losses), sum(errors, start=torch.zeros(())) / len(losses)
