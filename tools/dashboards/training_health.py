"""*Training health*: is there a signal to learn from, does the policy move well, do trainer and engine agree."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.parts import of_scheduler, quantiles
from dashboards.shared import JOB, NAMESPACE, ONE_JOB, POOL, POOLS, RANGE, Advice, Panel, Query, board, curves

UID = "streamrl-training-health"


def build() -> Dashboard:
    """Make it."""
    return board(
        UID,
        "StreamRL / Training health",
        says="Is there a signal to learn from, does the policy move as it should, do trainer and generators agree.",
        choices=(NAMESPACE, ONE_JOB, POOLS),
        sections={
            "Rewards": _rewards(),
            "The policy": _policy(),
            "The optimizer": _optimizer(),
            "Trainer against generators": _difference(),
        },
    )


def _rewards() -> list[Panel]:
    return [
        curves(
            "Reward of a step",
            of_scheduler("reward_mean", "mean"),
            of_scheduler("reward_std", "standard deviation"),
            says=Advice(
                good="the mean rises while some deviation stays.",
                otherwise="no deviation is no signal: harder or easier tasks.",
            ),
        ),
        curves(
            "Dead groups: all rewards equal",
            of_scheduler("zero_variance_groups_ratio", "share"),
            unit="percentunit",
            says=Advice(
                good="below a half.",
                otherwise="all right or all wrong teaches nothing: use dapo's dynamic sampling, or other tasks.",
            ),
        ),
        curves(
            "Samples without a reward",
            Query(expr=f"sum by (kind) (rate(streamrl_score_failures_total{{{JOB}}}[{RANGE}]))", legend="{{kind}}"),
            unit="ops",
            says=Advice(good="none.", otherwise="`streamrl journal show` has the text of a sample's error."),
        ),
        curves(
            "Groups that are dropped",
            Query(expr=f"sum by (reason) (rate(streamrl_dropped_groups_total{{{JOB}}}[{RANGE}]))", legend="{{reason}}"),
            unit="ops",
            says=Advice(
                good="none but zero_variance.",
                otherwise="too_stale wants fewer generators, the failures a look at logs.",
            ),
        ),
        curves(
            "Time of a reward",
            *quantiles("streamrl_reward_duration_seconds", JOB, by="reward"),
            unit="s",
            says=Advice(good="far below the time of a sample.", otherwise="more reward workers, or a faster function."),
        ),
        curves(
            "Warnings",
            Query(expr=f"sum by (type) (streamrl_warning{{{JOB}}})", legend="{{type}}"),
            says=Advice(good="0.", otherwise="`streamrl status` has the text of the warning, and what to do."),
        ),
    ]


def _policy() -> list[Panel]:
    return [
        curves(
            "KL divergence, nats",
            of_scheduler("behaviour_kl_nats", "from the policy that drew the tokens"),
            of_scheduler("reference_kl_nats", "from the reference"),
            says=Advice(
                good="small, and a slow rise from the reference.",
                otherwise="lower learningRate, raise the KL weight, or less staleness.",
            ),
        ),
        curves(
            "Entropy, nats",
            of_scheduler("entropy_nats", "mean of the step's tokens"),
            says=Advice(
                good="a slow fall.", otherwise="a fast fall to 0 is collapse, a rise is noise: lower learningRate."
            ),
        ),
        curves(
            "Tokens without a gradient",
            of_scheduler("clip_ratio", "clipped"),
            of_scheduler("masked_ratio", "masked by the correction"),
            unit="percentunit",
            says=Advice(
                good="below 20 %.",
                otherwise="the step is too large or too stale: lower learningRate or maxStalenessSteps.",
            ),
        ),
        curves(
            "Clipped tokens by lag",
            Query(expr=f"max by (pool, lag) (streamrl_pool_clip_ratio{{{POOL}}})", legend="{{pool}} lag {{lag}}"),
            unit="percentunit",
            says=Advice(
                good="near 0 at lag 0, more with each lag.",
                otherwise="much at lag 0 is a difference of engines, not of policies.",
            ),
        ),
    ]


def _optimizer() -> list[Panel]:
    return [
        curves(
            "Loss",
            of_scheduler("loss", "policy"),
            of_scheduler("value_loss", "critic"),
            says=Advice(
                good="near 0 and level; its value says little.",
                otherwise="a jump: compare gradient norm and KL at that step.",
            ),
        ),
        curves(
            "Gradient norm",
            of_scheduler("gradient_norm", "before clipping"),
            says=Advice(
                good="level.",
                otherwise="peaks beyond ten times the usual: lower learningRate, look at the step's samples.",
            ),
        ),
        curves(
            "Learning rate",
            of_scheduler("learning_rate", "of the last update"),
            says=Advice(good="as the job's schedule says.", otherwise="see warmUpSteps and learningRate."),
        ),
        curves(
            "Updates left out, per hour",
            Query(expr=f"sum(increase(streamrl_skipped_nonfinite_updates_total{{{JOB}}}[1h]))", legend="not finite"),
            says=Advice(good="0.", otherwise="a gradient was no number: lower learningRate, or use fp32 for the loss."),
        ),
    ]


def _difference() -> list[Panel]:
    def by_lag(name: str, how: str = "max") -> Query:
        return Query(
            expr=f"{how} by (pool, lag) (streamrl_train_infer_logprob_diff_{name}{{{POOL}}})",
            legend="{{pool}} lag {{lag}}",
        )

    return [
        curves(
            "Log-prob difference, mean, nats",
            by_lag("mean_nats"),
            says=Advice(
                good="lag 0 below trainInferLogprobDiff.maxMean.",
                otherwise="another precision or model code: see its runbook.",
            ),
        ),
        curves(
            "Log-prob difference, largest, nats",
            by_lag("max_nats"),
            says=Advice(good="single tokens, a few nats.", otherwise="use a correction that truncates or masks."),
        ),
        curves(
            "KL of generator from trainer, nats",
            by_lag("kl_nats"),
            says=Advice(good="lag 0 near 0.", otherwise="as for the mean: the two compute another policy."),
        ),
        curves(
            "Sequences outside the clip at every token",
            Query(
                expr=f"max by (pool, lag) (streamrl_pool_sequence_clip_ratio{{{POOL}}})", legend="{{pool}} lag {{lag}}"
            ),
            unit="percentunit",
            says=Advice(
                good="below 90 %.",
                otherwise="the clip is narrower than the policies are apart: widen it, or less staleness.",
            ),
        ),
        curves(
            "Tokens compared",
            by_lag("tokens", "sum"),
            says=Advice(good="most at low lags.", otherwise="most at 3 and 4+: less staleness learns faster."),
        ),
    ]
