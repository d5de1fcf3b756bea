"""`gepc serve`: a detector behind HTTP, with a page to look at."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gepc.cli.app import app, note, say
from gepc.cli.detect import BackboneOption, DetectorArgument
from gepc.core.errors import GepcError, OptionError

if TYPE_CHECKING:
    from gepc.serve import Settings

NEEDED = ("fastapi", "uvicorn", "python_multipart", "prometheus_client")
LOOPBACK = "127.0.0.1"
MEGA = 1_000_000


@app.command()
def serve(
    detector: DetectorArgument,
    host: Annotated[str, typer.Option(help="Where to listen; another than this machine needs a token.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    token: Annotated[
        str | None, typer.Option(envvar="GEPC_TOKEN", help="Callers must send it; best given by the variable.")
    ] = None,
    insecure_no_token: Annotated[
        bool, typer.Option("--insecure-no-token", help="Let everyone who reaches the host call without a token.")
    ] = False,
    backbone: BackboneOption = None,
    max_megabytes: Annotated[float, typer.Option(help="Of one request.")] = 32,
    max_megapixels: Annotated[float, typer.Option(help="Of one image.")] = 16,
    max_images: Annotated[int, typer.Option(min=1, help="Of one request.")] = 64,
    queue: Annotated[int, typer.Option(min=1, help="Images in service at once; more is answered with 503.")] = 256,
    max_batch: Annotated[int, typer.Option(min=1, help="Images handed to the network at once.")] = 32,
    timeout: Annotated[float, typer.Option(help="Seconds from a request to its answer.")] = 60,
    access_log: Annotated[bool, typer.Option("--access-log", help="A line for every request.")] = False,
) -> None:
    """Serve a detector: a page to drop images on, and an API to call.

    The page is at `/`, the API at `/docs`. It listens on this machine only; Ctrl-C finishes what was accepted and ends.
    After the detector's folder was replaced, `POST /v1/reload` takes it up.

    Example: `gepc serve det --port 8000`
    """
    check_extra()
    from gepc.serve.settings import LOOPBACK_NAMES, Settings, is_loopback

    if not is_loopback(host) and token is None and not insecure_no_token:
        raise OptionError(
            f"--host {host} lets other machines call: give --token (or GEPC_TOKEN), "
            "or say --insecure-no-token if everyone who reaches it may"
        )
    settings = Settings(
        token=token,
        hosts=(*LOOPBACK_NAMES, host) if is_loopback(host) else None,
        max_bytes=round(max_megabytes * MEGA),
        max_pixels=round(max_megapixels * MEGA),
        max_images=max_images,
        queue=queue,
        max_batch=max_batch,
        timeout=timeout,
    )
    serve_detector(detector, settings, host, port, backbone, access_log)


def check_extra() -> None:
    """One sentence where the packages for serving are missing."""
    from importlib.util import find_spec

    if any(find_spec(module) is None for module in NEEDED):
        raise GepcError("serving needs more packages; install with: pip install 'gepc[serve]'")


def serve_detector(
    detector: Path,
    settings: Settings,
    host: str = LOOPBACK,
    port: int = 8000,
    backbone: str | None = None,
    access_log: bool = False,
) -> None:
    """Serve until Ctrl-C; the address is printed once connections are accepted."""
    from gepc.serve import create_app, listen, run

    def ready(address: str) -> None:
        say(f"serving {detector.name} at {address} (API: {address}docs); stop with Ctrl-C")

    # listening comes first, so that a port that is taken is said before the weights are read
    with contextlib.closing(listen(host, port)) as listener:
        run(create_app(detector, settings, backbone), listener, ready, access_log)
    note("stopped; everything accepted was answered")
