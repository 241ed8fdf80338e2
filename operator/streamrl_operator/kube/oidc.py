"""ID tokens of an OIDC issuer: the auth-provider `oidc` of a kubeconfig's user.

Owns: when an ID token has ended, and how the issuer gives another. Nothing is written back into the kubeconfig.
Waits for: the issuer; unblocked by its answers or the deadline.
"""

import asyncio
import base64
import json
import ssl
import time
from typing import Any, ClassVar
from urllib.parse import quote_plus

import aiohttp
from pydantic import BaseModel, Field

from streamrl.errors import UserError
from streamrl_operator.kube.rest_config import TOKEN_AGE_S
from streamrl_pages.http_client import environment_proxy, session
from streamrl_pages.http_fetch import OversizeError, one_line

_TIMEOUT_S = 30.0
_SKEW_S = 10.0
"""Between our clock and the API server's."""


class Provider(BaseModel):
    """`config` of the auth-provider."""

    issuer: str = Field(alias="idp-issuer-url", pattern="^https://")
    client: str = Field(alias="client-id")
    secret: str = Field(default="", alias="client-secret", repr=False)
    id_token: str = Field(default="", alias="id-token", repr=False)
    refresh_token: str = Field(default="", alias="refresh-token", repr=False)


class _Endpoints(BaseModel):
    token_endpoint: str = Field(pattern="^https://")


class _Tokens(BaseModel):
    id_token: str
    refresh_token: str = ""


class Oidc:
    """The ID token that there is, and the next one when it ends. `tls`: whom we trust to be the issuer."""

    pause_s: ClassVar[float] = 5.0
    certificate: ClassVar[None] = None

    def __init__(self, provider: Provider, *, tls: ssl.SSLContext, timeout_s: float = _TIMEOUT_S) -> None:
        self._provider = provider
        self._timeout_s = timeout_s
        self._id_token, self._refresh_token = provider.id_token, provider.refresh_token
        self._tls = tls

    async def token(self, *, tls: ssl.SSLContext | None) -> str:
        """An ID token that lasts until it is asked for again, where there can be another.

        Raises:
            UserError: there is none, and the issuer gives none.
        """
        del tls
        left_s = _end_s(self._id_token) - time.time()
        if left_s < 0 and not self._refresh_token:
            raise self._failed("the ID token has ended, and there is no refresh-token")
        if left_s < TOKEN_AGE_S + _SKEW_S and self._refresh_token:
            try:
                async with asyncio.timeout(self._timeout_s):
                    found = await self._renewed()
            except TimeoutError:
                raise self._failed(f"it took more than {self._timeout_s:g} s") from None
            except (aiohttp.ClientError, OSError) as error:
                raise self._failed(one_line(error)) from None
            except (ValueError, OversizeError):
                raise self._failed("its answer cannot be used") from None
            self._id_token, self._refresh_token = found.id_token, found.refresh_token or self._refresh_token
        return self._id_token

    async def _renewed(self) -> _Tokens:
        given, headers = self._provider, {}
        form = {"grant_type": "refresh_token", "refresh_token": self._refresh_token}
        if given.secret:
            pair = f"{quote_plus(given.client)}:{quote_plus(given.secret)}"
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        else:
            form["client_id"] = given.client
        discovery = f"{given.issuer.rstrip('/')}/.well-known/openid-configuration"
        async with session(tls=self._tls, agent="streamrl") as asked:
            async with asked.get(discovery, proxy=environment_proxy(discovery), raise_for_status=True) as answer:
                endpoint = _Endpoints.model_validate_json(await answer.read()).token_endpoint
            proxy = environment_proxy(endpoint)
            once: dict[str, Any] = {"data": form, "headers": headers, "proxy": proxy, "raise_for_status": True}
            async with asked.post(endpoint, **once) as answer:
                return _Tokens.model_validate_json(await answer.read())

    def _failed(self, why: str) -> UserError:
        rule = f"the OIDC issuer {self._provider.issuer} gave no ID token ({why})"
        return UserError(field="KUBECONFIG", rule=rule, fix="log in there again")


def _end_s(token: str) -> float:
    """When an ID token ends; one that is none, or does not say it, has ended."""
    try:
        claims = token.split(".")[1]
        return float(json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["exp"])
    except (IndexError, KeyError, TypeError, ValueError, RecursionError):
        return 0.0
