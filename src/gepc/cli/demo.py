"""`gepc demo`: see the detector at work on photographs that are already on this machine."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gepc.cli.app import app, note, progress, say
from gepc.cli.backbones import seconds_per_pass
from gepc.cli.serve import check_extra, serve_detector
from gepc.core.errors import GepcError, InputError, StorageError
from gepc.core.files import read_json, write_json, write_text

if TYPE_CHECKING:
    from gepc.report.demo import Demo

BACKBONE = "celeba32-tiny"
KIND, SCHEMA = "gepc demo", 1
RESULTS, REPORT = "demo.json", "report.html"
NEEDED = {"jinja2": "jinja2", "matplotlib": "matplotlib", "skimage": "scikit-image"}


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="A folder for the report; one of an earlier demo is written over.")] = Path(
        "demo"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="A third of the patches, a third of the time.")] = False,
    backbone: Annotated[str, typer.Option(help="An embedded name, a diffusers folder, an OpenAI .pt.")] = BACKBONE,
    serve: Annotated[bool, typer.Option("--serve", help="Then serve the detector's page on this machine.")] = False,
) -> None:
    """Fit on patches of one photograph, score patches of others, write a report to look at. Needs no download.

    The photographs ship with scikit-image. The report, `report.html`, is one file that can be mailed; the numbers are
    also in `demo.json`.

    Example: `gepc demo --out demo --quick`
    """
    _check_extras()
    if serve:
        check_extra()
    _check_folder(out)
    import gepc
    from gepc.report import demo as demonstration
    from gepc.report.demo_page import build_page
    from gepc.report.page import render

    detector = demonstration.build_detector(gepc.load_backbone(backbone))
    _make_folder(out)
    data = demonstration.load_data(demonstration.QUICK if quick else demonstration.FULL)
    passes = demonstration.passes_needed(detector, data)
    note(_opening(data, passes, passes * seconds_per_pass(detector.backbone, detector.input_size)))
    with progress("network passes", passes) as advance:
        result = demonstration.run(detector, data, advance)
    note("drawing the report")
    html = render(build_page(result, _command(out, quick, backbone)))
    write_json(out / RESULTS, _results(result))  # first: it marks the folder as a demo's
    write_text(out / REPORT, html)
    for line in _lines(result):
        say(line)
    say(f"report: {out / REPORT}")
    if serve:
        from gepc.serve.settings import Settings

        result.detector.save(out / "detector")
        serve_detector(out / "detector", Settings(), port=0)


def _check_extras() -> None:
    from importlib.util import find_spec

    missing = [package for module, package in NEEDED.items() if find_spec(module) is None]
    if missing:
        raise GepcError(f"the demo needs {' and '.join(missing)}; install with: pip install 'gepc[demo]'")


def _check_folder(out: Path) -> None:
    """Refuse a place that holds something else, before any work."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; give a folder with --out")
    if out.is_dir() and any(out.iterdir()) and not _is_demo(out):
        raise InputError(f"{out} is not empty and holds no earlier demo; give another folder with --out")


def _make_folder(out: Path) -> None:
    """A place that cannot be written is an error before minutes of work, not after."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make the folder {out}: {error.strerror or error}; give another --out") from error


def _is_demo(folder: Path) -> bool:
    try:
        found = read_json(folder / RESULTS)
    except InputError:
        return False
    return isinstance(found, dict) and found.get("kind") == KIND


def _opening(data: Any, passes: int, seconds: float) -> str:
    duration = f"{seconds / 60:.1f} minutes" if seconds > 90 else f"{max(1.0, seconds):.0f} seconds"
    scored = sum(len(patches) for patches in data.scored)
    return (
        f"fit on {len(data.fit)} patches of {data.fit.name}, score {scored} of {data.fit.name}, "
        f"{', '.join(patches.name for patches in data.others)}: {passes:,} network passes, about {duration}"
    )


def _command(out: Path, quick: bool, backbone: str) -> str:
    """What repeats the run, with the folder's name and not its place on this machine."""
    words = ["gepc", "demo", "--out", out.name or "demo", *(["--quick"] if quick else [])]
    return shlex.join(words if backbone == BACKBONE else [*words, "--backbone", backbone])


def _results(result: Demo) -> dict[str, Any]:
    from gepc.detector.storage import describe

    return {"kind": KIND, "schema": SCHEMA, "detector": describe(result.detector), **result.as_dict()}


def _lines(result: Demo) -> list[str]:
    from gepc.report.demo_page import COLUMNS, mean_auroc, result_rows

    check = result.false_alarms()
    return [
        *_columns([COLUMNS, *result_rows(result)]),
        "",
        f"mean AUROC {mean_auroc(result):.3f}; {result.passes:,} passes in {result.seconds:.0f} s",
        f"false alarms on held-out {result.held_out.name} at alpha {check.alpha:g}: {check.alarms} of {check.count} "
        f"({check.low} to {check.high} expected with probability 0.9)",
        f"guarantee: {result.detector.guarantee(check.alpha)}",
    ]


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned text, the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
