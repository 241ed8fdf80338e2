"""The spec campaign: A to B equals a fresh B, A to B to A equals A, and what is wrong is refused by name.

Masked beyond `normal.py`, since they tell a job's past and not its spec: the history of sizes and its reason, who holds `replicas`, and in a
suspended job the certificates and the images, which are made and taken when pods are first wanted.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from cluster.campaign import specs
from cluster.campaign.bench import Bench, Station, WrongError
from cluster.campaign.cases import Result, at_rest, judged
from cluster.campaign.lab import JOB, NAMED_OBJECTS, AskedError, Lab, Objects
from cluster.campaign.mistakes import POD_MISTAKES, Mistake, single
from cluster.campaign.normal import Picture
from cluster.campaign.scenarios import sizes
from cluster.campaign.specs import Spec, document
from streamrl import names
from streamrl.errors import UserErrors
from streamrl.keys import FILE_IMAGES
from streamrl.spec import parse_job

MISTAKES_AT_ONCE = 25
_IMAGES = ("images", "f:images", FILE_IMAGES, f"f:{FILE_IMAGES}")
"""In the job's status and its ConfigMap, and who holds them."""
_REFUSED = ("Refused", "InvalidSpec")


async def run(kind: str, number: int, *, bench: Bench) -> Result:
    """One case; its result, whatever happens in it."""
    return await judged(f"spec/{kind}/{number}", lambda _: STORIES[kind](number, bench))


async def _pair(number: int, bench: Bench) -> None:
    """Two specs, of which one may follow the other."""
    a, b = await _drawn(number)
    async with bench.station("fresh") as station:
        fresh = await _begin(station, b)
        _check(station)
    async with bench.station("edited") as station:
        first = await _begin(station, a)
        for spec, want in ((b, fresh), (a, first)):
            station.view = _view(spec)
            await station.lab.replace_spec(spec)
            await _set_external(station, spec)
            await station.wait_until_equal(want)
            await station.stays(want, looks=not spec["suspend"])
        _check(station)


async def _drawn(number: int) -> tuple[Spec, Spec]:
    """Beside the loop: drawing takes longer than a proxy may stand still."""
    return await asyncio.to_thread(specs.drawn, number)


async def _begin(station: Station, spec: Spec) -> Picture:
    """A fresh job, at rest."""
    station.view = _view(spec)
    station.operator.start()
    for plural, body in NAMED_OBJECTS:
        await station.lab.create(plural, body)
    await station.lab.create("rljobs", document(spec))
    await station.wait_until_right(_unsettled)
    return await at_rest(lambda: station.stays(None, looks=not spec["suspend"]))


def _unsettled(objects: Objects) -> str:
    job = objects["rljobs", JOB]
    conditions = (job.get("status") or {}).get("conditions") or ()
    if not conditions or conditions[0]["observedGeneration"] != job["metadata"]["generation"]:
        return "the job's conditions are not about its spec"
    wanted, there = sum(sizes(objects).values()), sum(kind == "pods" for kind, _ in objects)
    return "" if wanted == there and sizes(objects) else f"{there} pods of {wanted}"


async def _set_external(station: Station, spec: Spec) -> None:
    """Whoever scales a pool from outside sets what a fresh job begins with, once the pool is his."""
    for pool in spec["generators"]:
        if "external" in pool["scaling"]:
            await station.wait_until_right(_not_yet_external(pool["name"]))
            await station.lab.scale(pool["name"], pool["scaling"]["external"]["initialReplicas"])


def _not_yet_external(pool: str) -> Callable[[Objects], str]:
    def wrong(objects: Objects) -> str:
        found = objects["generatorpools", names.pool(JOB, pool)]["spec"]["scaling"]
        return "" if found == "external" else f"pool {pool} is {found}"

    return wrong


def _view(spec: Spec) -> Callable[[Picture], Picture]:
    """What of a picture follows from the spec."""

    def view(whole: Picture) -> Picture:
        seen = {name: _masked(name, part) for name, part in whole.items()}
        if not spec["suspend"]:
            return seen
        return {name: _without(part, _IMAGES) for name, part in seen.items() if "secrets/" not in name}

    return view


def _without(value: Any, keys: Collection[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(part, keys) for key, part in value.items() if key not in keys}
    return value


def _masked(name: str, part: Any) -> Any:
    if not name.startswith("generatorpools/"):
        return part
    status = {key: value for key, value in part["status"].items() if key not in ("scalingHistory", "reason")}
    return {key: value for key, value in part.items() if key != "managers"} | {"status": status}


def _check(station: Station) -> None:
    if traces := station.operator.traces():
        raise WrongError(f"an error of ours in the log: {traces[0][:400]}")
    if not station.operator.runs:
        raise WrongError("the operator ended by itself")


async def _pod_mistake(number: int, bench: Bench) -> None:
    """A mistake that only the API server sees: said in a condition by the field's name; and put right, all is as before."""
    pod, field = list(POD_MISTAKES.values())[number]
    good = (await _drawn(number))[0] | {"suspend": False}
    good["generators"] = [good["generators"][0] | {"pod": {}, "scaling": {"static": {"replicas": 1}}}]
    bad = good | {"generators": [good["generators"][0] | {"pod": pod}]}
    async with bench.station("mistake") as station:
        want = await _begin(station, good)
        await station.lab.replace_spec(bad)
        await station.wait_until_right(_not_said(field))
        await station.lab.replace_spec(good)
        await station.wait_until_equal(want)
        _check(station)


def _not_said(field: str) -> Callable[[Objects], str]:
    def wrong(objects: Objects) -> str:
        ready = _ready(objects["rljobs", JOB])
        pools = [_ready(obj) for (kind, _), obj in objects.items() if kind == "generatorpools"]
        told = [each.get("message", "") for each in (*pools, *([ready] if ready.get("reason") in _REFUSED else []))]
        if any(field in each for each in told):
            return ""
        return f"no condition Ready names {field}: {ready.get('reason')}: {ready.get('message')}; of the pools: {pools}"

    return wrong


def _ready(obj: Mapping[str, Any]) -> Mapping[str, Any]:
    conditions = (obj.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each["type"] == "Ready"), {})


async def _mistakes(number: int, bench: Bench) -> None:
    """Mistakes in one spec, each shown to the API server (which only says what it would do) and to `parse_job`."""
    lab, spec = Lab(bench.admin, bench.server, "default"), (await _drawn(number))[0]
    made = single(spec, random.Random(number), number=MISTAKES_AT_ONCE)
    told = [(mistake, await _verdict(lab, mistake)) for mistake in made]
    if wrong := [f"{mistake.what} at {mistake.field}: {verdict}" for mistake, verdict in told if verdict]:
        raise WrongError("; ".join(wrong))


async def _verdict(lab: Lab, mistake: Mistake) -> str:
    """What is not as it should be; empty: both refuse it by name."""
    job = document(mistake.spec)
    try:
        parse_job(job)
        ours = ""
    except UserErrors as error:
        ours = str(error)
    path = f"{lab.path('rljobs')}?dryRun=All&fieldValidation=Strict"
    try:
        await lab.ask("POST", path, job)
        theirs = ""
    except AskedError as error:
        theirs = error.message
    if not ours and not theirs:
        return ""  # what was drawn is right by chance
    if bool(ours) != bool(theirs):
        return f"validate says {ours[:200]!r}, the API server {theirs[:200]!r}"
    return "" if mistake.field in theirs else f"the API server does not name it: {theirs[:300]}"


STORIES: Mapping[str, Callable[[int, Bench], Awaitable[None]]] = {
    "pair": _pair,
    "pod": _pod_mistake,
    "mistakes": _mistakes,
}
