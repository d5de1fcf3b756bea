"""The outermost layer: who may call, security headers and metrics of every response."""

import logging
import re
import secrets
import time

from fastapi.security.utils import get_authorization_scheme_param
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
PAGES, STATIC = ("/", "/docs"), "/static/"
PUBLIC = (*PAGES, "/healthz", "/readyz", "/openapi.json")
ROUTES = (*PUBLIC, "/metrics", "/v1/score", "/v1/map", "/v1/detector", "/v1/reload")


def refusal(status: int, reason: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error response in the API's format."""
    return JSONResponse({"error": reason}, status, headers)


class Guard:
    """Refuses requests that are not allowed; adds headers to every response and counts it; logs unexpected errors.

    starlette's `TrustedHostMiddleware` is not used: it answers in plain text, and older versions reject IPv6 addresses.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.metrics = app, service.metrics
        self.token, self.hosts = service.settings.token, service.settings.hosts
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
            await (self._refused(route, Headers(scope=scope)) or self.app)(scope, receive, send_with_headers)
        except ClientDisconnect:
            return None
        except Exception:
            log.exception("%s failed", route)
            if started:
                raise
            await refusal(500, "internal error; see the service's log")(scope, receive, send_with_headers)
        self.metrics.seconds.labels(route).observe(time.perf_counter() - start)
        return None

    def _refused(self, route: str, headers: Headers) -> JSONResponse | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.hosts is not None and _host_name(host) not in self.hosts:
            return refusal(421, "this host name is not allowed")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return refusal(403, "requests from pages of other sites are not allowed")
        if self.token is None or route in self.public:
            return None
        scheme, token = get_authorization_scheme_param(headers.get("authorization"))
        if scheme.lower() == "bearer" and secrets.compare_digest(token.encode(), self.token.encode()):
            return None
        reason = "the token is missing or wrong; send the header Authorization: Bearer TOKEN"
        return refusal(401, reason, {"WWW-Authenticate": "Bearer"})


def _host_name(host: str) -> str:
    """The name or address in a `Host` header, without brackets and port; empty if it is malformed."""
    found = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([\w.-]+))(?::\d{1,5})?", host.lower(), re.ASCII)
    return (found[1] or found[2]) if found else ""
