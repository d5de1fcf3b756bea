"""What a service allows: who may ask, how much at once, how long."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from gepc.core.errors import OptionError

MEGA = 1_000_000
SHORTEST_TOKEN = 16
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Settings:
    """Limits and access of one service; the defaults suit a machine with 4 GB of memory.

    Parameters
    ----------
    token : callers must send it as `Authorization: Bearer TOKEN`; None asks for none.
    hosts : names that the `Host` header may have, against DNS rebinding; None allows any.
    max_bytes, max_images : of one request.
    max_pixels : of one image, read off its header before it is decoded.
    max_held_bytes : of all requests together; more is answered with 503.
    queue : images in service at once, from acceptance to answer; more is answered with 503.
    max_batch : images handed to the network at once, at most the detector's own `batch_size`.
    gap : seconds without a newcomer after which a batch that is not full sets off.
    timeout : seconds from the first byte of a request to its answer.
    """

    token: str | None = None
    hosts: tuple[str, ...] | None = LOOPBACK_NAMES
    max_bytes: int = 32 * MEGA
    max_images: int = 64
    max_pixels: int = 16 * MEGA
    max_held_bytes: int = 256 * MEGA
    queue: int = 256
    max_batch: int = 32
    gap: float = 0.004
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.token is not None and len(self.token) < SHORTEST_TOKEN:
            raise OptionError(f"a token has at least {SHORTEST_TOKEN} characters; make one with: openssl rand -hex 16")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and " " not in self.token):
            raise OptionError("a token is made of printable ASCII characters without spaces")
        for name in ("max_bytes", "max_images", "max_pixels", "max_held_bytes", "queue", "max_batch", "timeout"):
            if getattr(self, name) <= 0:
                raise OptionError(f"{name} must be more than 0, got {getattr(self, name)}")
        if self.queue < self.max_images:
            raise OptionError(f"queue ({self.queue}) must hold the images of one request ({self.max_images})")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
