"""Who may ask and how much: small ASGI layers, outermost first in `app.create_app`."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from urllib.parse import urlsplit

import anyio
from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gepc.serve.batching import FullError
from gepc.serve.service import Service

log = logging.getLogger("gepc.serve")
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
PUBLIC = ("/", "/docs", "/healthz", "/readyz", "/openapi.json")
ROUTES = (*PUBLIC, "/metrics", "/v1/score", "/v1/map", "/v1/detector", "/v1/reload")
STATIC = "/static/"


def refusal(status: int, reason: str, **headers: str) -> JSONResponse:
    """An answer that says why there is no other."""
    return JSONResponse({"error": reason}, status, {name.replace("_", "-"): value for name, value in headers.items()})


class Observe:
    """Strict headers on every answer, its time and status in the metrics; a failure of ours is a sentence and a log."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.metrics = app, service.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; see the class."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        path, start = scope["path"], time.perf_counter()
        route = path if path in ROUTES else STATIC if path.startswith(STATIC) else "other"

        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-cache" if route in (STATIC, "/", "/docs") else "no-store")
                self.metrics.requests.labels(route, message["status"]).inc()
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        except ClientDisconnect:
            return None  # there is nobody to answer
        except Exception:
            log.exception("%s failed", route)
            if started:
                raise
            failed = refusal(500, "the service failed on this request; its log says more")
            await failed(scope, receive, send_with_headers)
        self.metrics.seconds.labels(route).observe(time.perf_counter() - start)
        return None


class Access:
    """Refuse other sites' pages, names that are not this service's, and callers without the token."""

    def __init__(self, app: ASGIApp, token: str | None, hosts: tuple[str, ...] | None) -> None:
        self.app, self.hosts = app, hosts
        self.digest = None if token is None else _digest(token.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on or refuse it; see the class."""
        refused = self._refused(scope["path"], Headers(scope=scope)) if scope["type"] == "http" else None
        await (refused or self.app)(scope, receive, send)

    def _refused(self, path: str, headers: Headers) -> JSONResponse | None:
        host = headers.get("host", "")
        if self.hosts is not None and _host_name(host) not in self.hosts:
            return refusal(421, "this service does not answer under that host name")
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return refusal(403, "pages of other sites may not call this service")
        if path in PUBLIC or path.startswith(STATIC) or self._knows(headers.get("authorization", "")):
            return None
        return refusal(401, "this service needs a token: Authorization: Bearer TOKEN", WWW_Authenticate="Bearer")

    def _knows(self, authorization: str) -> bool:
        if self.digest is None:
            return True
        scheme, _, token = authorization.partition(" ")
        # digests have one length, so that the comparison takes the same time whatever was sent
        same = hmac.compare_digest(_digest(token.strip().encode("latin-1", "replace")), self.digest)
        return same and scheme.lower() == "bearer"


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


class Bounded:
    """Bounds on bytes, whether or not a request declares its length, and on time."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service, self.settings = app, service, service.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on within bounds; see the class."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        declared = Headers(scope=scope).get("content-length", "0")
        if not declared.isdecimal() or int(declared) > self.settings.max_bytes:
            return await self._too_large()(scope, receive, send)
        started = False
        held = 0

        async def counted_receive() -> Message:
            nonlocal held
            message = await receive()
            size = len(message.get("body", b""))
            if held + size > self.settings.max_bytes:
                raise HTTPException(413, self._limit())
            try:
                self.service.held_bytes.enter(size)
            except FullError:
                raise self.service.busy() from None
            held += size
            return message

        async def noted_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            with anyio.move_on_after(self.settings.timeout) as limit:
                await self.app(scope, counted_receive, noted_send)
        finally:
            self.service.held_bytes.leave(held)
        if limit.cancelled_caught and not started:
            late = refusal(504, f"no answer within {self.settings.timeout:g} s; send fewer images or try again later")
            await late(scope, receive, send)
        return None

    def _limit(self) -> str:
        return f"the request has more than the {self.settings.max_bytes:,} bytes allowed"

    def _too_large(self) -> JSONResponse:
        return refusal(413, self._limit())
