"""The outermost layer: who may call, limits on bytes and time, security headers and metrics of every response."""

import contextlib
import logging
import re
import secrets
import time

import anyio
from fastapi import HTTPException
from fastapi.security.utils import get_authorization_scheme_param
from starlette.datastructures import Headers, MutableHeaders
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
EPILOGUE = 4096  # bytes at the end of a body in which its last boundary is looked for
PAGES, STATIC = ("/", "/docs"), "/static/"
PUBLIC = (*PAGES, "/healthz", "/readyz", "/openapi.json")
ROUTES = (*PUBLIC, "/metrics", "/v1/score", "/v1/detector")


def refusal(status: int, reason: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error response in the API's format."""
    return JSONResponse({"error": reason}, status, headers)


class Guard:
    """Refuses requests that are not allowed; adds headers to every response and counts it; logs unexpected errors.

    starlette's `TrustedHostMiddleware` is not used: it answers in plain text, and older versions reject IPv6 addresses.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service, self.metrics, self.settings = app, service, service.metrics, service.settings
        self.public = (STATIC, *PUBLIC, "/metrics") if service.settings.open_metrics else (STATIC, *PUBLIC)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        path, start, started = scope["path"], time.perf_counter(), False
        route = path if path in ROUTES else STATIC if path.startswith(STATIC) else "other"

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-cache" if route in (STATIC, *PAGES) else "no-store")
                self.metrics.requests.labels(route, message["status"]).inc()
            await send(message)

        try:
            with contextlib.ExitStack() as held, anyio.move_on_after(self.settings.timeout):
                headers = Headers(scope=scope)
                handler = self._refused(route, headers) or self.app
                await handler(scope, self._limited(receive, held, _end_of_form(headers)), send_with_headers)
            if not started:
                seconds = f"{self.settings.timeout:g} s"
                late = refusal(504, f"no answer within {seconds}; send fewer images or try again later")
                await late(scope, receive, send_with_headers)
        except Exception:
            log.exception("%s failed", route)
            if started:
                raise
            await refusal(500, "internal error; see the service's log")(scope, receive, send_with_headers)
        self.metrics.seconds.labels(route).observe(time.perf_counter() - start)
        return None

    def _limited(self, receive: Receive, held: contextlib.ExitStack, end: bytes) -> Receive:
        """`receive` for a body of limited size, whose bytes count as held by the service until `held` is closed.

        A body without its `end` is refused: the parser of forms leaves out a part that is cut short.
        """
        most, size, last = self.settings.max_bytes, 0, b""

        async def limited() -> Message:
            nonlocal size, last
            message = await receive()
            body = message.get("body", b"")
            count, last = len(body), (last + body)[-EPILOGUE:]
            size += count
            if size > most:
                raise HTTPException(413, f"the request is larger than the {most:,} bytes allowed")
            try:
                held.enter_context(self.service.held_bytes.take(count))
            except FullError as error:
                raise self.service.busy() from error
            if size and message["type"] == "http.request" and not message.get("more_body") and end not in last:
                raise HTTPException(400, "its last boundary is missing, so a part of it may be cut off")
            return message

        return limited

    def _refused(self, route: str, headers: Headers) -> JSONResponse | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.settings.hosts is not None and _host_name(host) not in self.settings.hosts:
            return refusal(421, "this host name is not allowed")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return refusal(403, "requests from pages of other sites are not allowed")
        wanted = self.settings.token
        if wanted is None or route in self.public:
            return None
        scheme, token = get_authorization_scheme_param(headers.get("authorization"))
        if scheme.lower() == "bearer" and secrets.compare_digest(token.encode(), wanted.encode()):
            return None
        reason = "the token is missing or wrong; send the header Authorization: Bearer TOKEN"
        return refusal(401, reason, {"WWW-Authenticate": "Bearer"})


def _end_of_form(headers: Headers) -> bytes:
    """The boundary that ends the form of a request; nothing for another body."""
    kind = headers.get("content-type", "")
    found = re.match(r'multipart/form-data\b.*\bboundary="?([^";]+)', kind, re.IGNORECASE)
    return f"--{found[1].strip()}--".encode("latin-1") if found else b""


def _host_name(host: str) -> str:
    """The name or address in a `Host` header, without brackets and port; empty if it is malformed."""
    found = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([\w.-]+))(?::\d{1,5})?", host.lower(), re.ASCII)
    return (found[1] or found[2]) if found else ""
