"""What an API server refused, as one line that says what to do. Pure: status code and body in, error out."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from streamrl import API_GROUP
from streamrl.errors import UserError, UserErrors
from streamrl_operator.kube.kinds import Kind

_USER = re.compile(r'User "([^"]*)"')
_INSTALL = (
    "install the operator there: helm install streamrl helm/streamrl --namespace streamrl-system --create-namespace"
)


class NotFoundError(UserError):
    """The object is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What was asked of which cluster."""

    verb: str
    """As roles name it: get, list, patch, delete."""
    kind: Kind
    namespace: str
    context: str
    """Name of the kubeconfig's context."""
    name: str = ""
    subresource: str = ""

    @property
    def plural(self) -> str:
        """The kind with its group: `rljobs.streamrl.io`."""
        group = self.kind.api_version.partition("/")[0] if "/" in self.kind.api_version else ""
        return f"{self.kind.plural}.{group}" if group else self.kind.plural

    @property
    def resource(self) -> str:
        """As roles name it: `pods/log`."""
        return f"{self.plural}{f'/{self.subresource}' if self.subresource else ''}"

    @property
    def thing(self) -> str:
        """What was asked for: `rljobs.streamrl.io/chain-sum`."""
        return f"{self.plural}{f'/{self.name}' if self.name else ''}"


def refusal(call: Call, *, code: int, body: str) -> UserError | UserErrors:
    """The error for an answer that is not a success."""
    status = _status(body)
    details = status.get("details") or {}
    message = status.get("message") or " ".join(body.split()) or f"status {code}"
    if code == HTTPStatus.UNAUTHORIZED:
        rule, fix = "the API server does not know this user", "log in again, or check the user of the context"
        return UserError(field=f"context {call.context}", rule=rule, fix=fix)
    if code == HTTPStatus.FORBIDDEN:
        return _forbidden(call, message=message)
    if code == HTTPStatus.NOT_FOUND:
        return _not_found(call, kind=details.get("kind"))
    causes = details.get("causes") or []
    if code == HTTPStatus.UNPROCESSABLE_ENTITY and causes:
        return UserErrors([_invalid(call, cause) for cause in causes])
    if code == HTTPStatus.CONFLICT and causes:
        return UserErrors(list(_conflicts(call, causes)))
    return UserError(field=call.thing, rule=f"the API server refused to {call.verb} it ({code}): {message}")


def _status(body: str) -> Mapping[str, Any]:
    try:
        status = json.loads(body)
    except ValueError:
        return {}
    return status if isinstance(status, dict) else {}


def _forbidden(call: Call, *, message: str) -> UserError:
    user = _USER.search(message)
    if "cannot" not in message or user is None:  # admission: quota, a namespace that ends
        return UserError(field=call.thing, rule=f"forbidden by the cluster: {message}")
    rule = f"user {user[1]} may not {call.verb} {call.resource} in namespace {call.namespace}"
    return UserError(field=f"context {call.context}", rule=rule, fix="ask for a role with this verb")


def _not_found(call: Call, *, kind: str | None) -> UserError:
    if kind == "namespaces":
        fix = f"make it: kubectl create namespace {call.namespace}"
        return UserError(field=f"namespace {call.namespace}", rule="does not exist", fix=fix)
    if kind is None and API_GROUP in call.plural:
        rule = f"is not known to the cluster of context {call.context}"
        return UserError(field=call.plural, rule=rule, fix=_INSTALL)
    fix = "`streamrl status` lists the jobs" if call.kind.plural == "rljobs" else ""
    return NotFoundError(field=call.thing, rule=f"is not in namespace {call.namespace}", fix=fix)


def _invalid(call: Call, cause: Mapping[str, Any]) -> UserError:
    field = str(cause.get("field") or "").removeprefix("<nil>") or call.thing
    rule = str(cause.get("message") or cause.get("reason") or "is not valid")
    return UserError(field=field, rule=rule.removeprefix("Invalid value: ").strip())


def _conflicts(call: Call, causes: list[Mapping[str, Any]]) -> Iterator[UserError]:
    for cause in causes:
        owner = re.search(r'"([^"]*)"', str(cause.get("message", "")))
        yield UserError(
            field=str(cause.get("field") or call.thing).removeprefix("."),
            rule=f"was set by {owner[1] if owner else 'somebody else'} since",
            fix="write that value into the file, or take the file's with --force",
        )
