"""Serve a detector over HTTP: an API and a web page. Needs the extra `gepc[serve]`.

    from gepc.serve import Settings, create_app, listen, run

    run(create_app("det", Settings()), listen("127.0.0.1", 8000))

A request passes through `middleware` (access and limits), `app` (the form and its options), `service` (files to pixels,
scores to decisions) and `batching` (one thread that calls the network). Nothing is written to disk.
"""

from gepc.serve.app import create_app
from gepc.serve.server import Settings, listen, run

__all__ = ["Settings", "create_app", "listen", "run"]
