"""uvicorn with the sockets, signals and limits that a service left running needs."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from gepc.core.errors import OptionError

BACKLOG = 512
MOST_CONNECTIONS = 512
KEEP_ALIVE = 15


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"cannot listen on {host} port {port}: {reason}; give another --host or --port") from error


def address(listener: socket.socket) -> str:
    """Where a browser finds it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def run(
    app: FastAPI,
    listener: socket.socket,
    on_ready: Callable[[str], None] | None = None,
    access_log: bool = False,
) -> None:
    """Serve until SIGINT or SIGTERM, then finish what was accepted and return; `on_ready` is told the address."""
    make_server(app, on_ready and (lambda: on_ready(address(listener))), access_log).run([listener])


def make_server(app: FastAPI, on_ready: Callable[[], None] | None = None, access_log: bool = False) -> uvicorn.Server:
    """A server that has not begun; in a thread other than the main one, set its `should_exit` to end it."""
    timeout = app.state.service.settings.timeout
    config = uvicorn.Config(
        app,
        log_level="info" if access_log else "warning",
        access_log=access_log,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=round(timeout) + 5,
        server_header=False,
        proxy_headers=False,
    )
    return _Server(config, on_ready)


class _Server(uvicorn.Server):
    """uvicorn raises the signal again after it has shut down; a clean end is a plain return here."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None] | None) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Say where, once connections are accepted."""
        await super().startup(sockets)
        if self.started and self._on_ready is not None:
            self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM begin the shutdown; a second SIGINT does not wait."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        former = {kind: signal.signal(kind, self.handle_exit) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for kind, handler in former.items():
                signal.signal(kind, handler)
