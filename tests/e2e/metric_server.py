"""A small external.metrics.k8s.io: one number that a test sets, for real HPAs.

The API server reaches it as any extension: APIService -> Service -> an endpoint, which is this machine as the node sees it.
"""

import json
import ssl
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from cluster.harness.cluster import NodeCluster
from cluster.harness.processes import wait_until

GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
NAME, NAMESPACE = "test-metrics", "kube-system"
AVAILABLE_S = 60.0


class MetricServer:
    """Serves until closed."""

    def __init__(self, cluster: NodeCluster) -> None:
        self.cluster = cluster
        self.value = 0
        self.asked = 0
        """Readings by HPAs."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(server.answer(self.path)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        address = cluster.addresses.outside
        self._http = ThreadingHTTPServer((address, 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*cluster.issue("metrics", "metrics", hosts=(address,)))
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        Thread(target=self._http.serve_forever, name="metrics", daemon=True).start()
        self._paths = [self._make(body) for body in self._objects(address, self._http.server_address[1])]
        wait_until(
            lambda: cluster.api.get(f"/apis/{GROUP}/{VERSION}").ok,
            what="the external metrics to be served",
            deadline_s=AVAILABLE_S,
        )

    def answer(self, path: str) -> dict[str, Any]:
        """A list of the API's resources, or the number."""
        parts = path.partition("?")[0].strip("/").split("/")
        if len(parts) == 3:
            resource = {"name": "*", "namespaced": True, "kind": "ExternalMetricValueList", "verbs": ["get"]}
            return {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": f"{GROUP}/{VERSION}",
                "resources": [resource],
            }
        self.asked += 1
        item = {
            "metricName": parts[-1],
            "metricLabels": {},
            "timestamp": "2026-01-01T00:00:00Z",
            "value": str(self.value),
        }
        return {"kind": "ExternalMetricValueList", "apiVersion": f"{GROUP}/{VERSION}", "metadata": {}, "items": [item]}

    def _objects(self, address: str, port: int) -> list[tuple[str, dict[str, Any]]]:
        metadata = {"name": NAME, "namespace": NAMESPACE}
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"ports": [{"port": 443, "targetPort": port}]},
        }
        endpoints = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**metadata, "labels": {"kubernetes.io/service-name": NAME}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
            "ports": [{"name": "", "port": port, "protocol": "TCP"}],
        }
        api = {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"{VERSION}.{GROUP}"},
            "spec": {
                "service": {"name": NAME, "namespace": NAMESPACE, "port": 443},
                "group": GROUP,
                "version": VERSION,
                "insecureSkipTLSVerify": True,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
            },
        }
        return [
            (f"/api/v1/namespaces/{NAMESPACE}/services", service),
            (f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices", endpoints),
            ("/apis/apiregistration.k8s.io/v1/apiservices", api),
        ]

    def _make(self, wanted: tuple[str, dict[str, Any]]) -> str:
        path, body = wanted
        self.cluster.api.create(path, body).expect()
        return f"{path}/{body['metadata']['name']}"

    def close(self) -> None:
        """Take all of it away."""
        for path in reversed(self._paths):
            self.cluster.api.delete(path)
        self._http.shutdown()
        self._http.server_close()
