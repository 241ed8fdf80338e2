"""The operator's configuration, from its environment (the chart's values). `crds/streamrl/keys.py` has the names."""

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl import keys
from streamrl.errors import UserError
from streamrl_operator.leader import LeaseSettings
from streamrl_operator.planning.certificates import Lives
from streamrl_operator.planning.values import PlanningSettings

_DEFAULT_PORT = 8080
_MAX_PORT = 65_535
_NUMBERS = ("SERVICE", "PROXY")
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_RETRIES_IN_A_LEASE, _RENEW_SHARE = 7.5, 2 / 3
"""As client-go relates 15, 10 and 2 seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """All of it."""

    planning: PlanningSettings
    kueue: bool
    """Whether jobs wait in queues of Kueue."""
    gangs: bool
    """Whether jobs may have PodGroups."""
    clusters: bool
    """Whether jobs may have pools in member clusters."""
    lives: Lives
    lease_settings: LeaseSettings
    kubeconfig: Path | None
    """None: the pod's service account."""
    identity: str
    """Of this process among its replicas."""
    port: int
    """Of health and metrics; 0 = any."""
    host: str
    log_level: str


def from_environment(environ: Mapping[str, str] = os.environ) -> OperatorSettings:
    """Read and check.

    Raises:
        UserError: a value cannot be used.
    """
    lives, lease_settings = Lives(), LeaseSettings()
    lease_s = _number(environ, keys.ENV_LEASE_SECONDS, default=lease_settings.lease_s, least=1)
    kubeconfig = environ.get(keys.ENV_KUBECONFIG, "")
    return OperatorSettings(
        planning=PlanningSettings(
            namespace=environ.get(keys.ENV_POD_NAMESPACE) or "default",
            trainer_image=_text(environ, keys.ENV_TRAINER_IMAGE),
            generator_image=_text(environ, keys.ENV_GENERATOR_IMAGE),
            namespaces=_names(environ, keys.ENV_NAMESPACES),
            job_defaults=_mapping(environ, keys.ENV_JOB_DEFAULTS),
            rdma_namespaces=_names(environ, keys.ENV_RDMA_NAMESPACES),
            sets_user=_one_of(environ, keys.ENV_SET_USER, ("TRUE", "FALSE"), default="TRUE") == "TRUE",
            isolates_jobs=_one_of(environ, keys.ENV_NETWORK_POLICIES, ("TRUE", "FALSE"), default="TRUE") == "TRUE",
            resync_s=_number(environ, keys.ENV_RESYNC_SECONDS, default=30, least=0.1),
            numbers_by_proxy=_one_of(environ, keys.ENV_NUMBERS, _NUMBERS, default=_NUMBERS[0]) == "PROXY",
        ),
        kueue=_one_of(environ, keys.ENV_KUEUE, ("TRUE", "FALSE"), default="FALSE") == "TRUE",
        gangs=_one_of(environ, keys.ENV_GANGS, ("TRUE", "FALSE"), default="FALSE") == "TRUE",
        clusters=_one_of(environ, keys.ENV_CLUSTERS, ("TRUE", "FALSE"), default="FALSE") == "TRUE",
        lives=Lives(
            ca_s=_number(environ, keys.ENV_CA_LIFE_SECONDS, default=lives.ca_s, least=1),
            leaf_s=_number(environ, keys.ENV_LEAF_LIFE_SECONDS, default=lives.leaf_s, least=1),
            settle_s=_number(environ, keys.ENV_CA_SETTLE_SECONDS, default=lives.settle_s, least=0),
        ),
        lease_settings=LeaseSettings(
            lease_s=lease_s, renew_s=lease_s * _RENEW_SHARE, retry_s=lease_s / _RETRIES_IN_A_LEASE
        ),
        kubeconfig=Path(kubeconfig.split(os.pathsep)[0]) if kubeconfig else None,
        identity=f"{environ.get(keys.ENV_POD_NAME_OPERATOR) or socket.gethostname()}_{os.urandom(4).hex()}",
        port=int(_number(environ, keys.ENV_SIGNALS_PORT, default=_DEFAULT_PORT, least=0, most=_MAX_PORT)),
        host=environ.get(keys.ENV_BIND_HOST) or "0.0.0.0",  # noqa: S104 - probes come from outside of the pod
        log_level=_one_of(environ, keys.ENV_LOG_LEVEL, _LEVELS, default="INFO"),
    )


def _text(environ: Mapping[str, str], key: str) -> str:
    value = environ.get(key, "").strip()
    if not value:
        raise UserError(field=key, rule="is required", fix="set it to an image (the chart does)")
    return value


def _names(environ: Mapping[str, str], key: str) -> tuple[str, ...]:
    return tuple(sorted(set(environ.get(key, "").replace(",", " ").split())))


def _mapping(environ: Mapping[str, str], key: str) -> Mapping[str, Any]:
    text = environ.get(key, "").strip() or "{}"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UserError(field=key, rule="must be a mapping as JSON", got=text)
    return found


def _number(environ: Mapping[str, str], key: str, *, default: float, least: float, most: float = float("inf")) -> float:
    text = environ.get(key, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        bound = f"at least {least:g}" if most == float("inf") else f"from {least:g} to {most:g}"
        raise UserError(field=key, rule=f"must be a number, {bound}", got=text, fix=f"unset it for {default:g}")
    return value


def _one_of(environ: Mapping[str, str], key: str, known: tuple[str, ...], *, default: str) -> str:
    value = environ.get(key, "").strip().upper() or default
    if value not in known:
        raise UserError(field=key, rule=f"must be one of {', '.join(known)}", got=value)
    return value
