"""How a service runs: its settings, its socket, and a uvicorn server that signals end cleanly."""

import copy
import ipaddress
import math
import signal
import socket
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from gepc.core.errors import OptionError, raising
from gepc.core.options import at_least, check_fields, positive

BACKLOG = MAX_CONNECTIONS = 512
KEEP_ALIVE = 15
MIN_TOKEN_LENGTH = 16
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Settings:
    """Access and limits of a service. The defaults keep a service on a CPU below 2 GB of memory.

    Parameters
    ----------
    token : str, optional
        Callers must send it as `Authorization: Bearer TOKEN`; None requires no token.
    open_metrics : bool
        Whether `/metrics`, which counts requests and images, is answered without the token.
    hosts : tuple of str, optional
        Names in the `Host` header, against DNS rebinding; None allows any.
    max_bytes : int
        Largest size of one request.
    max_images : int
        Largest number of images in one request.
    max_pixels : int
        Largest number of pixels in one image, checked before the image is decoded.
    max_network_pixels : int
        Largest number of pixels in one network call, and so in one preprocessed image.
    max_held_bytes : int
        Largest size of all requests in progress; beyond it, the answer is 503.
    queue : int
        Largest number of accepted images that are not answered yet; beyond it, the answer is 503.
    max_batch : int
        Largest number of images in one network batch, which the detector's `batch_size` also limits.
    gap : float
        Seconds without a new image after which an incomplete batch starts.
    timeout : float
        Seconds from the first byte of a request to its answer.
    device : str
        Where the detector runs; see `gepc.load_detector`.
    bands : tuple of int, optional
        The bands that are shown; see `gepc.images.preprocessing.rgb_picture`.

    Examples
    --------
    >>> from gepc.serve import Settings
    >>> Settings(max_images=8).timeout
    60.0
    """

    token: str | None = None
    open_metrics: bool = False
    hosts: tuple[str, ...] | None = LOOPBACK_NAMES
    max_bytes: int = at_least(1, 32_000_000)
    max_images: int = at_least(1, 64)
    max_pixels: int = at_least(1, 16_000_000)
    max_network_pixels: int = at_least(1, 1 << 18)
    max_held_bytes: int = at_least(1, 256_000_000)
    queue: int = at_least(1, 256)
    max_batch: int = at_least(1, 32)
    gap: float = 0.004
    timeout: float = positive(60.0)
    device: str = "auto"
    bands: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        token, least = self.token, MIN_TOKEN_LENGTH
        if token is not None and len(token) < least:
            raise OptionError(f"token must have at least {least} characters; create one with: openssl rand -hex 16")
        if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
            raise OptionError("token must consist of printable ASCII characters without spaces")
        check_fields(self)
        if self.queue < self.max_images:
            raise OptionError(f"queue ({self.queue}) must be at least max_images ({self.max_images})")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 takes a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    message = f"cannot listen on {host} port {port}: {{reason}}; choose another host or port"
    with raising(OptionError, message, OSError, OverflowError):
        return socket.create_server((host, port), family=family, backlog=BACKLOG)


def address(listener: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def run(app: FastAPI, listener: socket.socket) -> None:
    """Serve on the socket of `listen` until SIGINT or SIGTERM, then answer the accepted requests and return."""
    make_server(app).run([listener])


def make_server(app: FastAPI) -> uvicorn.Server:
    """A server that is not yet running; outside the main thread, set its `should_exit` to stop it."""
    config = uvicorn.Config(
        app,
        log_config=log_settings(),
        log_level="warning",
        access_log=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=math.ceil(app.state.service.settings.timeout),
        server_header=False,
        proxy_headers=False,
    )
    return _Server(config)


def log_settings() -> dict[str, Any]:
    """The configuration of the log: uvicorn's with the time of every line, for the lines of this package, too."""
    settings = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    for formatter in settings["formatters"].values():
        formatter["fmt"] = f"%(asctime)s {formatter['fmt']}"
    settings["loggers"]["gepc.serve"] = {"handlers": ["default"], "level": "INFO"}
    settings["loggers"]["python_multipart"] = {"level": "CRITICAL"}  # the caller gets the reason
    return settings


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; a second SIGINT does not wait for requests. Unlike uvicorn's, it does not raise the signal again."""
        self.force_exit |= self.should_exit and sig == signal.SIGINT
        self.should_exit = True
