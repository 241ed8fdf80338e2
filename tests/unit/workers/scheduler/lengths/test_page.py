"""What `/numbers` and Prometheus say of length signals: all keys from the start, then the values."""

import math
from random import Random

from streamrl_workers.metrics.prometheus import Metrics
from streamrl_workers.ranker.protocol import ProcessNumbers
from streamrl_workers.scheduler.lengths import LengthHistory, Lengths, LengthsView, prompt_key
from streamrl_workers.scheduler.shell.length_page import LengthGauges, length_numbers
from streamrl_workers.scheduler.shell.ranker_questions import RankerNumbers


def keys_of(page: object) -> object:
    return {key: keys_of(value) for key, value in page.items()} if isinstance(page, dict) else None


def learnt() -> LengthsView:
    """A ranker that knows, after 300 groups."""
    draw = Random(0)
    tokens = [draw.randint(1, 1000) for _ in range(300)]

    class Knows:
        def score(self, prompt: str) -> float:
            return float(tokens[int(prompt)])

        def learn(self, prompt: str, tokens: float) -> None:
            """It knows already."""

    lengths = Lengths(LengthHistory(), signals=("History", "Siblings", "Ranker"), ranker=Knows())
    for number, count in enumerate(tokens):
        key, prompt = prompt_key(str(number)), str(number)
        lengths.began(number, key=key, prompt=prompt)
        lengths.learn(key, tokens=[count], prompt=prompt, group_id=number)
    return lengths.view()


def test_the_key_set_is_stable() -> None:
    assert keys_of(length_numbers(LengthsView())) == keys_of(length_numbers(learnt()))


def test_numbers() -> None:
    page = length_numbers(learnt())
    assert page["trusted"] is True
    assert page["predictions"] == {"History": 0, "Siblings": 0, "Ranker": 300, "Nothing": 0}
    ranker, history = page["signals"]["Ranker"], page["signals"]["History"]
    assert (ranker["trusted"], ranker["pairs"], history["trusted"], history["pairs"]) == (True, 288, False, 0)
    assert ranker["recall"]["20"]["value"] > 0.9 > ranker["recall"]["20"]["lower"] > 0.7
    assert history["recall"]["5"] == {"value": None, "lower": None}
    assert length_numbers(LengthsView())["trusted"] is False


def test_gauges() -> None:
    metrics = Metrics(role="scheduler", process="scheduler")
    gauges = LengthGauges(metrics)
    gauges.set(LengthsView())
    before = values(metrics)
    gauges.set(learnt())
    after = values(metrics)
    assert set(before) == set(after)
    assert before["streamrl_length_trusted"] == 0
    assert math.isnan(before["streamrl_length_ranker_recall_20_lower"])
    assert after["streamrl_length_trusted"] == after["streamrl_length_ranker_trusted"] == 1
    assert after["streamrl_length_history_trusted"] == 0
    assert after["streamrl_length_ranker_pairs"] == 288
    assert after["streamrl_length_ranker_rank_correlation"] > 0.9
    assert after['streamrl_length_predictions_total source="Ranker"'] == 300
    assert after['streamrl_length_predictions_total source="Nothing"'] == 0


def values(metrics: Metrics) -> dict[str, float]:
    """Name (and source) of each length metric -> value."""
    found = {}
    for line in metrics.render().decode().splitlines():
        if line.startswith("streamrl_length_") and "_created" not in line:
            name, _, rest = line.partition("{")
            labels, _, value = rest.rpartition("} ")
            source = [label for label in labels.split(",") if label.startswith("source=")]
            found[" ".join([name, *source])] = float(value)
    return found


def test_the_rankers_process_in_numbers_and_gauges() -> None:
    done = RankerNumbers(
        state="ready",
        waiting=3,
        dropped=1,
        scored=40,
        deaths=2,
        process=ProcessNumbers(rounds=4, pairs=500, cpu_s=9.5),
    )
    page = length_numbers(LengthsView(), done)["ranker"]
    assert keys_of(page) == keys_of(length_numbers(LengthsView())["ranker"])
    assert length_numbers(LengthsView())["ranker"]["state"] == "none"
    assert page == {
        "state": "ready",
        "deaths": 2,
        "waiting": 3,
        "scored": 40,
        "dropped": 1,
        "pairs": 500,
        "rounds": 4,
        "cpu_s": 9.5,
    }
    metrics = Metrics(role="scheduler", process="scheduler")
    LengthGauges(metrics).set_ranker(done)
    text = metrics.render().decode()
    assert [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith("streamrl_ranker_rounds")] == [
        "4.0"
    ]
    assert [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith("streamrl_ranker_ready")] == [
        "1.0"
    ]
