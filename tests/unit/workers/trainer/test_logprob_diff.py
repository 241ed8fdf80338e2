"""The trainer's against the generators' log-probs by pool and version lag, against plain loops in float64."""

import math

import pytest
import torch

from streamrl.proto import stream_pb2 as pb
from streamrl.spec.training import LogprobDiffBound
from streamrl_workers.metrics.logprob_diff import MEASURES, OTHER, PoolLag, key, new_warnings, read, steps_above
from streamrl_workers.stream.packing import unpack_float32, unpack_int32
from streamrl_workers.trainer.engines.forward import DIFFS
from streamrl_workers.trainer.engines.step_metrics import version_lag
from support.tiny_trainer import tiny_engine, tiny_model
from support.trainer_groups import make_group, trainer_spec

STEP, ATTEMPT = 3, 1


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def spanned(group: pb.Group, generator_id: str, *spans: tuple[int, int]) -> pb.Group:
    """Its samples drawn by that generator; the first token under the first (step, attempt), the rest under the last."""
    for sample in group.samples:
        sample.generator_id = generator_id
        total = len(unpack_int32(sample.tokens))
        (first, first_attempt), (last, last_attempt) = spans[0], spans[-1]
        del sample.spans[:]
        sample.spans.append(pb.VersionSpan(tokens=1, step=first, attempt=first_attempt))
        if total > 1:
            sample.spans.append(pb.VersionSpan(tokens=total - 1, step=last, attempt=last_attempt))
    return group


def groups() -> dict[PoolLag, pb.Group]:
    """With the pair that each belongs to."""
    return {
        PoolLag("sim", "0"): spanned(make_group(1), "generator-sim-0", (3, 1)),
        PoolLag("sim", "1"): spanned(make_group(2), "generator-sim-1", (2, 1), (3, 1)),
        PoolLag("sim", "3"): spanned(make_group(3), "generator-sim-0", (0, 1), (2, 1)),
        PoolLag(OTHER, "1"): spanned(make_group(4), "a-name-of-its-own", (3, 0)),
    }


def differences(group: pb.Group) -> list[float]:
    """log proximal - log behaviour of each token, one sample at a time, without padding."""
    model, found = tiny_model().double(), []
    for sample in group.samples:
        prompt, tokens = list(unpack_int32(sample.prompt_tokens)), list(unpack_int32(sample.tokens))
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=torch.tensor([prompt + tokens])).logits[0], -1)
        for place, (token, behaviour) in enumerate(zip(tokens, unpack_float32(sample.logprobs), strict=True)):
            found.append(float(logprobs[len(prompt) + place - 1, token]) - behaviour)
    return found


@pytest.mark.parametrize("rule", ["grpo", "ppo"])
def test_every_trained_token_is_compared_by_pool_and_lag(rule):
    engine = tiny_engine(trainer_spec(rule=rule, microBatchTokens=64))
    engine.begin_step(STEP, attempt=ATTEMPT)
    drawn = groups()
    engine.add(list(drawn.values()))
    metrics = engine.finish_step()
    for at, group in drawn.items():
        diffs = differences(group)
        want = {
            "train_infer_logprob_diff_mean": sum(map(abs, diffs)) / len(diffs),
            "train_infer_logprob_diff_max": max(map(abs, diffs)),
            "train_infer_logprob_diff_kl": sum(math.exp(d) - 1 - d for d in diffs) / len(diffs),
            "train_infer_logprob_diff_tokens": len(diffs),
        }
        assert {name: metrics[key(name, at)] for name in want} == pytest.approx(want, rel=1e-4)
    newest = key("", PoolLag("sim", "0"))
    for name in DIFFS:
        assert metrics[name] == metrics[name + newest], "without pool and lag: all samples of lag 0"
    for measure in MEASURES:
        assert read(metrics, measure=measure).keys() == drawn.keys(), "nothing is said of what has no tokens"
    compared = read(metrics, measure="train_infer_logprob_diff_tokens")
    assert sum(compared.values()) == metrics["forward_tokens"]
    clipped = sum(share * compared[at] for at, share in read(metrics, measure="clip_fraction").items())
    assert clipped / metrics["forward_tokens"] == pytest.approx(metrics["clip_fraction"])


def test_a_sequence_is_outside_the_clip_where_all_of_its_tokens_are():
    """Log-probs that are far from the policy's put each token outside; with bounds that nothing leaves none is."""
    shares = {}
    for clip in (1e-6, 0.999):
        engine = tiny_engine(trainer_spec(rule="grpo", algorithm={"clipLow": clip, "clipHigh": 10 * clip}))
        engine.begin_step(0, attempt=1)
        engine.add([make_group(1)])
        metrics = engine.finish_step()
        shares[clip] = metrics["sequence_clip_fraction"], metrics["clip_fraction"]
    assert shares[1e-6][0] == 1.0 > shares[1e-6][1], "about half of what is outside has no gradient"
    assert shares[0.999][0] < 1.0


def test_gspo_with_a_clip_far_narrower_than_the_difference_says_so():
    """Its own bounds, some 500 times narrower than `grpo`'s, and log-probs as far off as another model's."""
    engine = tiny_engine(trainer_spec(rule="gspo", learningRate=1e-6))
    above, said = {}, []
    for step in range(6):
        engine.begin_step(step, attempt=1)
        engine.add([make_group(number, step=step) for number in range(8)])
        metrics = engine.finish_step()
        assert metrics["sequence_clip_fraction"] > 0.9
        above = steps_above(metrics, truncated=0.0, bound=LogprobDiffBound(maxMean=100.0), before=above)
        line = {"trainer": metrics, "above_bound": above}
        said.append([one.type for one in new_warnings(line, bound=LogprobDiffBound(maxMean=100.0))])
    assert said == [[], [], [], [], ["SequencesClipped"], []]


@pytest.mark.parametrize("correction", ["truncatedImportance", "maskedImportance", "decoupledPpo"])
def test_gspo_on_the_policy_of_the_steps_start_clips_nothing(correction):
    engine = tiny_engine(trainer_spec(rule="gspo", correction={correction: {}}))
    engine.begin_step(0, attempt=1)
    engine.add([make_group(number) for number in range(4)])
    assert engine.finish_step()["sequence_clip_fraction"] == 0.0


@pytest.mark.parametrize(
    ("spans", "lag"),
    [
        ([(3, 1)], 0),
        ([(3, 1), (3, 1)], 0),
        ([(2, 1), (3, 1)], 1),
        ([(0, 1), (3, 1)], 3),
        ([(3, 0)], 1),  # the same number in an attempt that was rolled back
        ([(5, 0)], 1),
        ([(1, 0), (3, 1)], 2),
    ],
)
def test_the_lag_of_a_sample_is_that_of_its_oldest_token(spans, lag):
    group = spanned(make_group(1), "generator-sim-0", *spans)
    assert {version_lag(sample, step=STEP, attempt=ATTEMPT) for sample in group.samples} == {lag}
