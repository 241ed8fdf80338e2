"""An OIDC issuer on this machine, as far as an API server and its clients ask one: discovery, keys, new ID tokens. Keeps its clients' secrets in the clear."""

import base64
import json
import ssl
import tempfile
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from support.certificates import Authority

CLIENT, SECRET = "streamrl", "s3cret&%"
HOST = "localhost"
LIFE_S = 3600.0


class OidcIssuer:
    """Serves in a thread until its block ends. A refresh token is good for one time, as with issuers that rotate them."""

    def __init__(self) -> None:
        self.authority = Authority("issuer")
        self.refresh_token = "refresh-0"
        self.asked: list[str] = []
        """Paths, in order."""
        self.told: list[str] = []
        """Authorization of each."""
        pair = f"{urllib.parse.quote_plus(CLIENT)}:{urllib.parse.quote_plus(SECRET)}"
        self.basic = f"Basic {base64.b64encode(pair.encode()).decode()}"
        """That of the client."""
        self.answer: tuple[int, bytes] | None = None
        """Given instead of tokens."""
        self.life_s = LIFE_S
        """Of the tokens that it gives."""
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"https://{HOST}:{self._server.server_port}"
        leaf, context = self.authority.leaf("issuer", hosts=(HOST,)), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.NamedTemporaryFile() as pair:
            Path(pair.name).write_bytes(leaf.chain + leaf.key_pem)
            context.load_cert_chain(pair.name)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def id_token(self, user: str, *, life_s: float = LIFE_S, groups: tuple[str, ...] = ()) -> str:
        """A token for a user; its text has the characters that only base64url has."""
        now_s = int(time.time())
        claims = {"iss": self.url, "aud": CLIENT, "sub": user, "groups": groups, "iat": now_s, "exp": now_s + life_s}
        claims["name"] = "ÿ??>>~~ÿÿ"
        head = {"alg": "RS256", "typ": "JWT", "kid": "one"}
        signed = ".".join(_b64(json.dumps(each, ensure_ascii=False).encode()) for each in (head, claims))
        return f"{signed}.{_b64(self._key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256()))}"

    def provider(self, **config: str) -> dict[str, Any]:
        """`user` of a kubeconfig."""
        known = {"idp-issuer-url": self.url, "client-id": CLIENT, "client-secret": SECRET}
        known["idp-certificate-authority-data"] = base64.b64encode(self.authority.pem).decode()
        return {"auth-provider": {"name": "oidc", "config": known | config}}

    def _reply(self, path: str, form: dict[str, list[str]], who: str) -> tuple[int, bytes]:
        if path == "/.well-known/openid-configuration":
            found = {"issuer": self.url, "jwks_uri": f"{self.url}/keys", "token_endpoint": f"{self.url}/token"}
            more = {"subject_types_supported": ["public"], "response_types_supported": ["id_token"]}
            return 200, json.dumps(found | more | {"id_token_signing_alg_values_supported": ["RS256"]}).encode()
        if path == "/keys":
            numbers = self._key.public_key().public_numbers()
            parts = {"n": _number(numbers.n), "e": _number(numbers.e), "kid": "one"}
            return 200, json.dumps({"keys": [{"kty": "RSA", "use": "sig", "alg": "RS256"} | parts]}).encode()
        if self.answer is not None:
            return self.answer
        if who != self.basic or form.get("refresh_token") != [self.refresh_token]:
            return 401, b'{"error": "invalid_grant"}'
        self.refresh_token = f"refresh-{len(self.asked)}"
        tokens = {
            "id_token": self.id_token("ada", life_s=self.life_s, groups=("readers",)),
            "refresh_token": self.refresh_token,
        }
        return 200, json.dumps(tokens | {"access_token": "unused", "token_type": "Bearer"}).encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                form = urllib.parse.parse_qs(self.rfile.read(length).decode())
                who = self.headers.get("Authorization", "")
                issuer.asked.append(self.path)
                issuer.told.append(who)
                status, body = issuer._reply(self.path, form, who)
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                return

        return Handler

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), name="issuer", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _number(value: int) -> str:
    return _b64(value.to_bytes((value.bit_length() + 7) // 8, "big"))
