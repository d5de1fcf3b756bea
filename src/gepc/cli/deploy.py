"""`gepc watch` and `gepc serve`: score files as they arrive, and answer requests over HTTP."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from gepc.cli import options as opt
from gepc.cli.app import note, say
from gepc.core.errors import GepcError, OptionError

if TYPE_CHECKING:
    from gepc.serve import Settings

NEEDED = ("fastapi", "uvicorn", "python_multipart", "prometheus_client")
LOOPBACK = "127.0.0.1"
MEGA = 1_000_000


def watch(
    detector: opt.DetectorArgument,
    folder: Annotated[Path, Argument(help="Folder to watch, including its subfolders.")],
    out: Annotated[Path, Option(help="CSV file to append to; files already listed in it are not scored again.")],
    alpha: opt.Alpha = 0.05,
    delta: Annotated[float, Option(help="Probability of ever reporting drift when there is none.")] = 0.01,
    window: Annotated[int, Option(min=1, help="Number of recent images in the rolling alarm rate.")] = 200,
    interval: Annotated[float, Option(min=0.05, help="Seconds between two scans of the folder.")] = 2.0,
    once: Annotated[bool, Option("--once", help="Score the files that are there and exit.")] = False,
    backbone: opt.OtherBackbone = None,
) -> None:
    """Score files as they appear in a folder; report every alarm and the moment the stream drifts.

    Stop with Ctrl-C and continue with the same command: no file is lost or scored twice.

    Example: `gepc watch det incoming/ --out log.csv --alpha 0.01`
    """
    from gepc.runs.watch import Watch
    from gepc.verdicts.monitor import Monitor

    loaded = opt.open_detector(detector, backbone)
    loaded.guarantee(alpha)
    watcher = Watch(folder, loaded, Monitor(loaded, alpha, delta, window), out, *((0.0, 0.0) if once else (1.0, 10.0)))
    if watcher.done:
        note(f"{out}: resuming after {len(watcher.done)} files")
    known_drift = watcher.monitor.drifted
    try:
        while True:
            for row in watcher.step():
                if row.verdict is None:
                    note(f"{row.result.name}: {row.result.error}")
                elif row.verdict.alarm:
                    say(f"alarm  {row.result.name}  p = {row.verdict.p_value:.4g}")
                if row.verdict is not None and row.verdict.drifted and not known_drift:
                    known_drift = True
                    say(
                        f"drift  after {row.verdict.seen} images the stream no longer looks like the calibration "
                        f"images (false-alarm probability at most {delta:g})"
                    )
            if once:
                break
            time.sleep(interval)
    finally:
        note(f"{len(watcher.done)} files in {out}")


def serve(
    detector: opt.DetectorArgument,
    host: Annotated[str, Option(help="Address to bind; non-loopback addresses require --token.")] = LOOPBACK,
    port: Annotated[int, Option(min=0, max=65535, help="Port to bind; 0 picks a free one.")] = 8000,
    token: Annotated[str | None, Option(envvar="GEPC_TOKEN", help="Bearer token that clients must send.")] = None,
    insecure_no_token: Annotated[
        bool, Option("--insecure-no-token", help="Accept requests from other machines without a token.")
    ] = False,
    backbone: opt.OtherBackbone = None,
    max_megabytes: Annotated[float, Option(help="Maximum size of a request in megabytes.")] = 32,
    max_megapixels: Annotated[float, Option(help="Maximum size of an image in megapixels.")] = 16,
    max_images: Annotated[int, Option(min=1, help="Maximum number of images per request.")] = 64,
    queue: Annotated[int, Option(min=1, help="Maximum number of images in progress; then status 503.")] = 256,
    max_batch: Annotated[int, Option(min=1, help="Maximum number of images per network call.")] = 32,
    timeout: Annotated[float, Option(help="Seconds after which a request is given up.")] = 60,
    access_log: Annotated[bool, Option("--access-log", help="Print a line for every request.")] = False,
) -> None:
    """Serve a detector over HTTP: a web page for uploading images, and an API.

    The page is at `/`, the API documentation at `/docs`. By default only this machine can connect. Ctrl-C completes
    accepted requests and exits. If the detector's folder has been replaced, `POST /v1/reload` loads the new one.

    Example: `gepc serve det --port 8000`
    """
    check_serving()
    from gepc.serve.server import LOOPBACK_NAMES, Settings, is_loopback

    if not is_loopback(host) and token is None and not insecure_no_token:
        raise OptionError(
            f"--host {host} lets other machines connect: give --token (or set GEPC_TOKEN), "
            "or --insecure-no-token to accept everyone"
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


def check_serving() -> None:
    """Raise an error if the packages for serving are not installed."""
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
    """Serve until Ctrl-C; the address is printed once the detector is loaded."""
    from gepc.serve import create_app, listen, run
    from gepc.serve.server import address

    # listen first, so that a port in use is reported before the weights are loaded
    with contextlib.closing(listen(host, port)) as listener:
        service = create_app(detector, settings, backbone)
        url = address(listener)
        say(f"serving {detector.name} at {url} (API: {url}docs); stop with Ctrl-C")
        run(service, listener, access_log)
    note("stopped; all accepted requests were answered")
