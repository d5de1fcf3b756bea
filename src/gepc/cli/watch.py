"""`gepc watch`: score files as they appear, and say when the stream has moved."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from gepc.cli.app import app, note, say
from gepc.cli.detect import BackboneOption, DetectorArgument


@app.command()
def watch(
    detector: DetectorArgument,
    folder: Annotated[Path, typer.Argument(help="The folder to watch, subfolders included.")],
    out: Annotated[Path, typer.Option(help="A CSV that rows are appended to; it is also the memory of the watch.")],
    alpha: Annotated[float, typer.Option(help="False-alarm rate of the verdict on one image.")] = 0.05,
    delta: Annotated[float, typer.Option(help="Probability of ever calling a drift on an unmoved stream.")] = 0.01,
    window: Annotated[int, typer.Option(min=1, help="Images that the rolling alarm rate looks back on.")] = 200,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Score what is there and stop.")] = False,
    backbone: BackboneOption = None,
) -> None:
    """Score files as they appear; print a line for every alarm and when the stream has drifted.

    Stop it with Ctrl-C, start it again with the same command: no file is lost, none is scored twice.

    Example: `gepc watch det incoming/ --out log.csv --alpha 0.01`
    """
    import gepc
    from gepc.runs.watch import Watch
    from gepc.verdicts.monitor import Monitor

    loaded = gepc.load_detector(detector, backbone)
    loaded.guarantee(alpha)
    watcher = Watch(folder, loaded, Monitor(loaded, alpha, delta, window), out, *((0.0, 0.0) if once else (1.0, 10.0)))
    if watcher.done:
        note(f"{out}: going on after {len(watcher.done)} files")
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
