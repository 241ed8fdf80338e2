"""*Bubbles*: what each second was lost to: by process, cause, skew of lengths, weights."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.parts import BUBBLE, WALL, idle_share, of_gpus, of_scheduler, quantiles, where_time_goes
from dashboards.shared import (
    JOB,
    NAMESPACE,
    ONE_JOB,
    RANGE,
    Advice,
    Panel,
    Query,
    bars,
    board,
    coloured,
    curves,
    heat,
    shares,
    stacked,
    timeline,
)

UID = "streamrl-bubbles"
_LOST = f'{BUBBLE}{{{JOB},part!="busy"}}'
_BY_CAUSE = "sum by (role, part, cause)"
_CAUSE = "{{role}} {{part}} {{cause}}"


def build() -> Dashboard:
    """Make it."""
    return board(
        UID,
        "StreamRL / Bubbles",
        says="Where the wall time of every process of a job goes, and why. The parts add up to it.",
        choices=(NAMESPACE, ONE_JOB),
        sections={
            "What each second was lost to": _lost(),
            "GPUs, where dcgm-exporter runs": _gpus(),
            "By process": _processes(),
            "Skew: short answers wait for long ones": _skew(),
            "Weights": _weights(),
        },
    )


def _lost() -> list[Panel]:
    return [
        shares(
            "Generators",
            where_time_goes("generator"),
            says=Advice(
                good="busy fills the picture.",
                otherwise="staleness wants a larger maxStalenessSteps or fewer generators, no_prompts a larger batch, "
                "back_pressure a faster trainer, skew dispatch by length.",
            ),
        ),
        shares(
            "Trainer",
            where_time_goes("trainer"),
            says=Advice(
                good="busy fills the picture.",
                otherwise="no_samples wants more or faster generators, scoring a larger task.processes, due_group one long group less (dispatch by length), "
                "weights a faster link.",
            ),
        ),
        coloured(
            bars(
                "Seconds lost in the time shown",
                Query(expr=f"sort_desc({_BY_CAUSE} (increase({_LOST}[$__range])) > 0)", legend=_CAUSE),
                unit="s",
                says=Advice(
                    good="no bar stands out.", otherwise="begin with the longest bar: it is the dearest cause."
                ),
            )
        ),
        stacked(
            "Processes idle, by cause",
            Query(expr=f"{_BY_CAUSE} (rate({_LOST}[{RANGE}])) > 0", legend=_CAUSE),
            unit="short",
            says=Advice(
                good="below one process for each ten.",
                otherwise="the widest band says how many devices do nothing, and why.",
            ),
        ),
    ]


def _processes() -> list[Panel]:
    return [
        timeline(
            "Idle share of each process",
            Query(expr=idle_share("process", JOB), legend="{{process}}"),
            says=Advice(
                good="green lines.",
                otherwise="one red line among green ones is one slow or lost process; red columns are a stall of all.",
            ),
        ),
        curves(
            "Share of each second that the parts account for",
            Query(
                expr=f"sum by (process) (rate({BUBBLE}{{{JOB}}}[{RANGE}])) / "
                f"sum by (process) (rate({WALL}{{{JOB}}}[{RANGE}]))",
                legend="{{process}}",
            ),
            unit="percentunit",
            says=Advice(good="100 % for every process.", otherwise="the numbers above are wrong: report it as a bug."),
        ),
        curves(
            "Active slots",
            Query(
                expr=f"sum by (process) (streamrl_generator_active{{{JOB}}}) / "
                f"sum by (process) (streamrl_generator_slots{{{JOB}}})",
                legend="{{process}}",
            ),
            unit="percentunit",
            says=Advice(
                good="all near 100 %.",
                otherwise="one lower than the others takes less work: compare its speed in Pools and links.",
            ),
        ),
    ]


def _gpus() -> list[Panel]:
    by, used, free = "pod, gpu", of_gpus("DCGM_FI_DEV_FB_USED"), of_gpus("DCGM_FI_DEV_FB_FREE")
    memory = f"sum by ({by}) ({used}) / (sum by ({by}) ({used}) + sum by ({by}) ({free}))"
    return [
        curves(
            "GPU utilisation",
            Query(expr=f"avg by ({by}) ({of_gpus('DCGM_FI_DEV_GPU_UTIL')}) / 100", legend="{{pod}} {{gpu}}"),
            unit="percentunit",
            width=8,
            says=Advice(
                good="high where the process is busy.",
                otherwise="busy without the GPU is work of the processor: tokens, rewards, loading. Idle with it: another pod shares the GPU.",
            ),
        ),
        curves(
            "GPU memory in use",
            Query(expr=memory, legend="{{pod}} {{gpu}}"),
            unit="percentunit",
            width=8,
            says=Advice(
                good="below 95 %.",
                otherwise="little of it: raise gpuMemoryPercent, maxConcurrency or microBatchTokens. Nearly all: lower them.",
            ),
        ),
        curves(
            "Last XID error",
            Query(expr=f"max by ({by}) ({of_gpus('DCGM_FI_DEV_XID_ERRORS')})", legend="{{pod}} {{gpu}}"),
            width=8,
            says=Advice(
                good="0.",
                otherwise="NVIDIA's list of XIDs says what it was: 13, 31 and 43 are programs' faults, 48, 63, 79 and 94 the device's: drain the node.",
            ),
        ),
    ]


def _skew() -> list[Panel]:
    return [
        heat(
            "Lengths of trained samples",
            Query(expr=f"sum by (le) (increase(streamrl_sample_tokens_bucket{{{JOB}}}[{RANGE}]))", legend="{{le}}"),
            unit="short",
            says=Advice(
                good="one compact band.",
                otherwise="a thin tail far above the band is what others wait for: use dispatch by length, or lower maxTokens.",
            ),
        ),
        curves(
            "Lost to skew",
            Query(
                expr=f'sum by (pool) (rate({BUBBLE}{{{JOB},part="skew"}}[{RANGE}])) / '
                f'sum by (pool) (rate({WALL}{{{JOB},role="generator"}}[{RANGE}]))',
                legend="{{pool}}",
            ),
            unit="percentunit",
            says=Advice(
                good="below 10 %.", otherwise="set scheduling.dispatch to auto, allow rebalancing, or more staleness."
            ),
        ),
        curves(
            "Recall of the longest 20 %",
            of_scheduler("length_recall_ratio", "{{signal}}", by="signal"),
            of_scheduler("length_recall_lower_ratio", "{{signal}}, lower limit", by="signal"),
            unit="percentunit",
            says=Advice(
                good="well above 20 %, which is chance; a signal is used only once its lower limit is.",
                otherwise="add a ranker, or leave out the signal that does not help.",
            ),
        ),
        curves(
            "Rank correlation of predicted lengths",
            of_scheduler("length_rank_correlation", "{{signal}}", by="signal"),
            of_scheduler("length_trusted", "in use"),
            says=Advice(
                good="above 0.5, and in use (1).",
                otherwise="lengths cannot be told from the prompt: prefer rebalancing.",
            ),
        ),
        curves(
            "Length of samples",
            *quantiles("streamrl_sample_tokens", JOB),
            says=Advice(
                good="the 95th percentile is below three medians.",
                otherwise="answers that grow without reward want a length reward.",
            ),
        ),
        curves(
            "What predicted lengths",
            Query(
                expr=f"sum by (source) (rate(streamrl_length_predictions_total{{{JOB}}}[{RANGE}]))", legend="{{source}}"
            ),
            unit="ops",
            says=Advice(
                good="most groups begin with a prediction.",
                otherwise="a ranker predicts prompts that were never seen; history only those that come again.",
            ),
        ),
    ]


def _weights() -> list[Panel]:
    generators = f'{JOB},role="generator"'
    return [
        curves(
            "Lost to weights",
            Query(
                expr=f'sum by (process) (rate({BUBBLE}{{{JOB},part="weights"}}[{RANGE}])) / '
                f"sum by (process) (rate({WALL}{{{JOB}}}[{RANGE}]))",
                legend="{{process}}",
            ),
            unit="percentunit",
            says=Advice(good="below 5 %.", otherwise="see the two times beside: the link, or the engine's load."),
        ),
        curves(
            "Time to pull a version",
            *quantiles("streamrl_weights_pull_duration_seconds", generators),
            unit="s",
            width=6,
            says=Advice(good="below a step's time.", otherwise="the link is too narrow: put generators nearer."),
        ),
        curves(
            "Time to load a version",
            *quantiles("streamrl_weights_load_duration_seconds", generators),
            unit="s",
            width=6,
            says=Advice(good="below a tenth of a step.", otherwise="the engine stands still meanwhile: see its log."),
        ),
    ]
