"""What the chart's own pods run: `uninstall` before a release is deleted, `check` in `helm test`.

Owns: stopping the operator, clearing its finalizers, or deleting RLJobs first; asking whether the release works. Speaks to the API server
with the standard library alone, so it depends on nothing of the operator that it stops. It is handed to Python as text by the templates.

    uninstall   Refuse: end here while a job has not ended
                Delete: delete the jobs, wait until the operator has cleared them away
                then stop the operator and wait for it to be gone: it would put its finalizers back; then take them away
    check       the API server serves our kinds; an operator says that it leads and can do its work, or that another leads
"""

import http.client
import json
import os
import signal
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GROUP = "/apis/streamrl.io/v1alpha1"
FINALIZERS = "streamrl.io/"
"""Ours begin so."""
SERVED = {"rljobs", "rljobs/status", "generatorpools", "generatorpools/status", "generatorpools/scale"}
POLL_S = 1.0
"""Between two looks at what is being waited for."""
REQUEST_S = 15.0
"""Deadline of one request and its whole answer."""
MOST_BYTES = 2**25
"""Maximum size of an answer: a page of `PAGE_OBJECTS` takes a few MB."""
REASON_BYTES = 500
"""Of a refusal that are read."""
REDIRECT = 300
"""Statuses from here on are no success."""
READY_S = 60.0
"""`check` waits so long for the operator."""
PAGE_OBJECTS = 250
"""Objects in one answer: a hundred jobs are a few MB."""
NAMED = 10
"""So many jobs are named in an error."""


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: our token would go along."""

    def redirect_request(self, *_: object) -> None:
        """Leave the answer as it is."""


def ask(request: urllib.request.Request, tls: ssl.SSLContext | None = None) -> tuple[int, bytes]:
    """Return status and body of the answer; all of it is there within `REQUEST_S`."""

    def late(*_: object) -> None:
        raise TimeoutError(f"no whole answer within {REQUEST_S:g} s")

    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=tls), NoRedirects)
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, REQUEST_S)
    try:
        with opener.open(request) as answer:
            body = answer.read(MOST_BYTES + 1)
            if len(body) > MOST_BYTES:
                raise ValueError(f"the answer has more than {MOST_BYTES} bytes")
            return answer.status, body
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(REASON_BYTES)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def words(body: bytes) -> str:
    """A refusal as text."""
    return body.decode(errors="replace").strip()


class Api:
    """The API server, as a pod with a ServiceAccount reaches it."""

    def __init__(self) -> None:
        host = os.environ["KUBERNETES_SERVICE_HOST"]
        host = f"[{host}]" if ":" in host else host
        self._url = f"https://{host}:{os.environ['KUBERNETES_SERVICE_PORT']}"
        self._account = Path(os.environ.get("SERVICE_ACCOUNT_DIR", "/var/run/secrets/kubernetes.io/serviceaccount"))
        self._tls = ssl.create_default_context(cafile=str(self._account / "ca.crt"))

    def call(self, method: str, path: str, body: object = None) -> dict[str, Any] | None:
        """The answer, or None where the thing does not exist."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Authorization": f"Bearer {(self._account / 'token').read_text()}", "Content-Type": kind}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, method=method, data=data, headers=headers)  # noqa: S310 - always https
        try:
            status, body = ask(request, self._tls)
            if status == 404:  # noqa: PLR2004 - HTTP's "not found"
                return None
            if status >= REDIRECT:
                raise SystemExit(f"{method} {path}: {status} {words(body)}")
            return dict(json.loads(body))
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            raise SystemExit(f"{method} {path}: {error or type(error).__name__}") from error

    def each(self, path: str, selector: str = "") -> Iterator[dict[str, Any]]:
        """All objects of a collection, page by page; none where the kind does not exist."""
        token = ""
        while True:
            query = urllib.parse.urlencode({"limit": PAGE_OBJECTS, "continue": token, "labelSelector": selector})
            page = self.call("GET", f"{path}?{query}")
            if page is None:
                return
            yield from page["items"]
            token = page["metadata"].get("continue", "")
            if not token:
                return


def collections(kind: str) -> list[str]:
    """Paths of a kind in the namespaces that the operator watches."""
    namespaces = [one for one in os.environ["STREAMRL_NAMESPACES"].split(",") if one]
    return [f"{GROUP}/namespaces/{one}/{kind}" for one in namespaces] or [f"{GROUP}/{kind}"]


def objects(api: Api, kind: str) -> list[dict[str, Any]]:
    """All of a kind that the operator watches."""
    return [one for path in collections(kind) for one in api.each(path)]


def path_of(kind: str, item: dict[str, Any]) -> str:
    """Path of one object."""
    namespace = item["metadata"].get("namespace")
    return "/".join([GROUP, *(["namespaces", namespace] if namespace else []), kind, item["metadata"]["name"]])


def names(items: list[dict[str, Any]]) -> str:
    """namespace/name of the first few."""
    about = [item["metadata"] for item in items[:NAMED]]
    told = ["/".join(filter(None, (one.get("namespace"), one["name"]))) for one in about]
    return ", ".join(told + ([f"and {len(items) - NAMED} more"] if len(items) > NAMED else []))


def refuse_unfinished(api: Api) -> None:
    """End with an error while a job has not ended."""
    unfinished = [one for one in objects(api, "rljobs") if not one.get("status", {}).get("completionTime")]
    if unfinished:
        raise SystemExit(
            f"not uninstalled: these RLJobs have not ended: {names(unfinished)}; wait for them, or delete them"
        )


def delete_jobs(api: Api, deadline: float) -> None:
    """Delete all jobs and wait until they are gone."""
    for item in objects(api, "rljobs"):
        print(f"deleting {names([item])}")  # noqa: T201 - the pod's log
        api.call("DELETE", path_of("rljobs", item), {"propagationPolicy": "Background"})
    while left := objects(api, "rljobs"):
        wait(deadline, f"the operator to clear away {names(left)}")


def stop_operator(api: Api, deadline: float) -> None:
    """Scale the operator to 0 and wait until its pods are gone."""
    namespace, name = os.environ["POD_NAMESPACE"], os.environ["OPERATOR_DEPLOYMENT"]
    here = f"/namespaces/{namespace}"
    if api.call("PATCH", f"/apis/apps/v1{here}/deployments/{name}/scale", {"spec": {"replicas": 0}}) is None:
        return
    while left := list(api.each(f"/api/v1{here}/pods", os.environ["OPERATOR_SELECTOR"])):
        wait(deadline, f"the operator to end: {names(left)}")


def clear_finalizers(api: Api) -> None:
    """Take our finalizers away, so that what is left can be deleted without an operator."""
    found = [(kind, item) for kind in ("rljobs", "generatorpools") for item in objects(api, kind)]
    if os.environ.get("STREAMRL_CLUSTERS"):
        found += [("rlclusters", item) for item in api.each(f"{GROUP}/rlclusters")]
    for kind, item in found:
        have = item["metadata"].get("finalizers", [])
        keep = [one for one in have if not one.startswith(FINALIZERS)]
        if keep != have:
            # The resourceVersion: what somebody else added meanwhile is not lost; then the pod is tried again.
            metadata = {"finalizers": keep, "resourceVersion": item["metadata"]["resourceVersion"]}
            api.call("PATCH", path_of(kind, item), {"metadata": metadata})
            print(f"cleared the finalizer of {kind} {names([item])}")  # noqa: T201 - the pod's log


def uninstall() -> None:
    """Before the release is deleted."""
    api = Api()
    deadline = time.monotonic() + float(os.environ["UNINSTALL_TIMEOUT_SECONDS"])
    policy = os.environ["UNINSTALL_JOBS"]
    if policy == "Refuse":
        refuse_unfinished(api)
    if policy == "Delete":
        delete_jobs(api, deadline)
    stop_operator(api, deadline)
    clear_finalizers(api)


def check() -> None:
    """`helm test`."""
    found = {one["name"] for one in (Api().call("GET", GROUP) or {"resources": []})["resources"]}
    if missing := SERVED - found:
        raise SystemExit(
            f"the API server does not serve {', '.join(sorted(missing))} of streamrl.io/v1alpha1; install the CRDs"
        )
    print("the API server serves RLJobs and GeneratorPools")  # noqa: T201 - the pod's log
    url, deadline = os.environ["OPERATOR_URL"], time.monotonic() + READY_S
    while why := unready(url):
        wait(deadline, f"the operator to be ready: {url} says: {why}; the log of the operator's pods tells more")
    print("the operator is ready, and one leads")  # noqa: T201 - the pod's log


def unready(url: str) -> str:
    """What the page says if it does not answer with 200."""
    try:
        status, body = ask(urllib.request.Request(url))  # noqa: S310 - the chart's own URL
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"no answer ({error})"
    return "" if status < REDIRECT else words(body) or f"status {status}"


def wait(deadline: float, what: str) -> None:
    """Pause before the next look, or end with what was waited for."""
    if time.monotonic() > deadline:
        raise SystemExit(f"gave up waiting for {what}")
    time.sleep(POLL_S)


if __name__ == "__main__":
    {"uninstall": uninstall, "check": check}[sys.argv[1]]()
