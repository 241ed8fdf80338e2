"""*Job*: one job: does it learn, how fast, where time goes, how stale, what it costs."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.parts import by_pool, idle_share, of_scheduler, quantiles, where_time_goes
from dashboards.shared import (
    JOB,
    NAMESPACE,
    ONE_JOB,
    RANGE,
    Advice,
    Panel,
    Query,
    board,
    curves,
    number,
    shares,
    stacked,
)

UID = "streamrl-job"


def build() -> Dashboard:
    """Make it."""
    return board(
        UID,
        "StreamRL / Job",
        says="One job: reward, speed, bubbles, staleness and cost.",
        choices=(NAMESPACE, ONE_JOB),
        sections={
            "Now": _now(),
            "Does it learn": _learning(),
            "Where time goes": _bubbles(),
            "How fast": _speed(),
            "What it costs": _cost(),
        },
    )


def _now() -> list[Panel]:
    return [
        number(
            "Steps done",
            Query(expr=f"sum(streamrl_step{{{JOB}}}) / sum(streamrl_planned_steps{{{JOB}}})"),
            unit="percentunit",
            says=Advice(good="rises.", otherwise="the trainer's bubbles below say what it waits for."),
        ),
        number(
            "Held-out reward",
            Query(expr=f"max(streamrl_evaluation_reward_mean{{{JOB}}})"),
            says=Advice(good="above the last checkpoint's.", otherwise="look at Training health before you go on."),
        ),
        number(
            "Trained tokens/s",
            Query(expr=f"sum(rate(streamrl_trained_tokens_total{{{JOB}}}[{RANGE}]))"),
            says=Advice(good="steady.", otherwise="see where time goes, below."),
        ),
        number(
            "Trainer idle",
            Query(expr=idle_share("role", f'{JOB},role="trainer"')),
            unit="percentunit",
            says=Advice(good="below 10 %.", otherwise="more generators, or a larger maxStalenessSteps."),
        ),
        number(
            "Generators idle",
            Query(expr=idle_share("role", f'{JOB},role="generator"')),
            unit="percentunit",
            says=Advice(good="below 10 %.", otherwise="fewer generators, or a larger batch."),
        ),
        number(
            "Lives of the trainer",
            Query(expr=f"max(streamrl_attempt{{{JOB}}})"),
            says=Advice(good="1.", otherwise="read the trainer's log for why it ended; checkpoint more often."),
        ),
    ]


def _learning() -> list[Panel]:
    return [
        curves(
            "Reward",
            of_scheduler("reward_mean", "trained"),
            of_scheduler("evaluation_reward_mean", "held out, greedy"),
            of_scheduler("evaluation_sampled_reward_mean", "held out, sampled"),
            says=Advice(
                good="all rise together.",
                otherwise="held-out reward that falls while the trained one rises is overfitting, or a reward that is gamed: read samples.",
            ),
        ),
        curves(
            "Staleness against its bound",
            of_scheduler("staleness_bound_steps", "bound S"),
            of_scheduler("staleness_max_steps", "largest of the step"),
            Query(
                expr=f"sum(rate(streamrl_group_staleness_steps_sum{{{JOB}}}[{RANGE}])) / "
                f"sum(rate(streamrl_group_staleness_steps_count{{{JOB}}}[{RANGE}]))",
                legend="mean",
            ),
            says=Advice(
                good="the mean is well below S.",
                otherwise="a mean at S, with generators idle for staleness, asks for a larger maxStalenessSteps or fewer generators.",
            ),
        ),
    ]


def _bubbles() -> list[Panel]:
    return [
        shares(
            "Generators",
            where_time_goes("generator"),
            says=Advice(
                good="busy fills the picture.",
                otherwise="the widest other band is the cause; Bubbles says what to do about each.",
            ),
        ),
        shares(
            "Trainer",
            where_time_goes("trainer"),
            says=Advice(
                good="busy fills the picture.",
                otherwise="pipeline no_samples wants generators, weights wants a faster link, other is start and checkpoints.",
            ),
        ),
    ]


def _speed() -> list[Panel]:
    return [
        curves(
            "Tokens/s",
            Query(expr=f"sum(rate(streamrl_generator_tokens_total{{{JOB}}}[{RANGE}]))", legend="generated"),
            Query(expr=f"sum(rate(streamrl_trained_tokens_total{{{JOB}}}[{RANGE}]))", legend="trained"),
            says=Advice(
                good="both are near each other; held-out answers are generated only.",
                otherwise="what is generated and not trained was dropped: see Training health.",
            ),
        ),
        curves(
            "Time of a step",
            *quantiles("streamrl_step_duration_seconds", JOB),
            unit="s",
            says=Advice(good="flat.", otherwise="it grows with the answers' length: see the heat map in Bubbles."),
        ),
        curves(
            "How full the trainer's devices are",
            of_scheduler("mfu_ratio", "model FLOPs utilisation"),
            of_scheduler("padding_ratio", "padding"),
            unit="percentunit",
            says=Advice(
                good="utilisation of 30 % and more; little padding. Without a known peak there is no utilisation.",
                otherwise="raise microBatchTokens, or use BF16; see the parts beside it.",
            ),
        ),
        curves(
            "Time of a step's passes",
            of_scheduler("pass_seconds", "{{part}}", by="part"),
            unit="s",
            says=Advice(
                good="backward takes twice as long as forward, the others little.",
                otherwise="much data: fewer, longer passes; much of collectives: a faster link; much optimiser: more groups a step.",
            ),
        ),
        curves(
            "Samples on their way",
            Query(expr=f"sum(streamrl_queue_samples{{{JOB}}})", legend="wait for a slot"),
            Query(expr=f"sum(streamrl_running_samples{{{JOB}}})", legend="in a slot"),
            says=Advice(
                good="some wait, so that no slot is empty.",
                otherwise="none waits: slots are empty. Ever more wait: add generators.",
            ),
        ),
        curves(
            "Groups on their way, by state",
            Query(expr=f'sum by (state) (streamrl_groups{{{JOB},state!~"consumed|dropped"}})', legend="{{state}}"),
            says=Advice(
                good="steady.", otherwise="many scored ones wait for the trainer, many generated ones for rewards."
            ),
        ),
    ]


def _cost() -> list[Panel]:
    return [
        curves(
            "Age of the newest checkpoint",
            Query(
                expr=f"time() - max by (namespace, rljob) (streamrl_trainer_checkpoint_timestamp_seconds{{{JOB}}})",
                legend="what would be trained again",
            ),
            unit="s",
            says=Advice(
                good="a saw: it falls with each checkpoint.",
                otherwise="this much is lost if the trainer ends now: lower storage.checkpoints.intervalSteps.",
            ),
        ),
        stacked(
            "Cost per hour",
            by_pool(f"sum by (pool) (streamrl_cost_per_hour{{{JOB}}})"),
            unit="short",
            says=Advice(
                good="follows the replicas.",
                otherwise="give costPerHour in the job: a process counts 1 where it has none.",
            ),
        ),
        curves(
            "Cost so far",
            by_pool(f"sum by (pool) (streamrl_cost_total{{{JOB}}})"),
            says=Advice(good="within your budget.", otherwise="suspend the job; a checkpoint keeps what it learned."),
        ),
        curves(
            "Cost per million trained tokens",
            Query(expr=f"sum(streamrl_cost_per_million_tokens{{{JOB}}})", legend="per million"),
            says=Advice(good="flat.", otherwise="a rise is idle time: see where time goes."),
        ),
        curves(
            "Cost per step and per reward point",
            Query(expr=f"sum(streamrl_cost_per_step{{{JOB}}})", legend="step"),
            Query(expr=f"sum(streamrl_cost_per_reward_point{{{JOB}}})", legend="reward point (.01)"),
            says=Advice(
                good="a reward point costs what it is worth to you.",
                otherwise="a steep rise says that the job has learned what it can: end it.",
            ),
        ),
    ]
