"""A detector behind HTTP: an API to call and a page to look at. Needs the extra `gepc[serve]`.

    from gepc.serve import Settings, create_app, listen, run

    run(create_app("det", Settings()), listen("127.0.0.1", 8000))

A request goes one way: middleware (who may ask, how much) -> reading (bytes) -> decoding (pixels) -> batcher (one
thread that calls the network) -> answer. Nothing is written to disk.
"""

from __future__ import annotations

from gepc.serve.app import create_app
from gepc.serve.server import listen, run
from gepc.serve.settings import Settings

__all__ = ["Settings", "create_app", "listen", "run"]
