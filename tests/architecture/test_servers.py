"""Every port is opened in one of a few files, where its bounds are: a new server cannot forget them."""

import ast

from support.tree import PACKAGES, ROOT, calls, place, sources, syntax

HOMES = {
    "pages/streamrl_pages/server.py": "HTTP for probes, pages and agents",
    "workers/streamrl_workers/stream/channel.py": "gRPC",
    "workers/streamrl_workers/weights/http_server.py": "weights over HTTP",
    "workers/streamrl_workers/trainer/engines/process_group.py": "rendezvous of ranks",
    "workers/streamrl_workers/trainer/engines/sharding.py": "torch's store",
    "workers/streamrl_workers/tasks/host.py": "a Unix socket of two containers of one pod",
}
MODULES = {"uvicorn", "http.server", "socketserver", "wsgiref", "xmlrpc.server", "aiohttp.web", "hypercorn"}
CALLS = {"create_server", "create_unix_server", "start_server", "start_unix_server", "TCPStore", "listen"}
SIGNALS = "shutdown.listen"
"""Handlers of signals, no socket."""


def _opens() -> set[tuple[str, str]]:
    """(file, place) of all that opens a port, or imports what does."""
    found = []
    for path in sources(*PACKAGES):
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            found += [(path, node.lineno) for name in names if any(f"{name}.".startswith(f"{m}.") for m in MODULES)]
        for name, call in calls(path):
            text = ast.unparse(call.func)
            if (name in CALLS and text != SIGNALS) or text in ("grpc.aio.server", "grpc.server"):
                found.append((path, call.lineno))
    return {(str(path.relative_to(ROOT)), place(path, line)) for path, line in found}


def test_ports_are_opened_where_their_bounds_are() -> None:
    opens = _opens()
    strangers = sorted(where for file, where in opens if file not in HOMES)
    assert not strangers, f"serve by {', '.join(HOMES)}, or give the port bounds there"
    assert {file for file, _ in opens} == HOMES.keys()
