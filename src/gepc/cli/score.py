"""`gepc score`: scores, p-values and alarms for any number of images, on one machine or on a cluster."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from gepc.cli import options as opt
from gepc.cli.app import note, printing, progress
from gepc.cli.options import estimate
from gepc.core.errors import InputError, OptionError, StorageError

if TYPE_CHECKING:
    from gepc.detector.detector import Detector
    from gepc.images.sources import Images
    from gepc.runs.cluster import Cluster
    from gepc.runs.local import Labels
    from gepc.runs.shards import Decide, ScoreRun, TableSummary
    from gepc.verdicts.decision import DecisionRule


@dataclass(frozen=True)
class Request:
    """How the images are scored. None of it changes a score."""

    detector: Path
    images: str
    backbone: str | None
    device: str
    batch_size: str | None
    shard_size: int
    restart: bool
    workers: int
    cluster: Cluster | None


@opt.with_groups
def score(
    detector: opt.DetectorArgument,
    images: opt.ImagesArgument,
    out: Annotated[Path | None, Option(help="CSV or Parquet file; standard output by default.")] = None,
    alpha: opt.Alpha = 0.05,
    confidence: Annotated[float | None, Option(help="Probability that alpha holds for this calibration set.")] = None,
    fdr: Annotated[float | None, Option(help="False-discovery rate to control, instead of --alpha.")] = None,
    procedure: Annotated[str, Option(help="Procedure for --fdr: bh (Benjamini-Hochberg) or storey.")] = "bh",
    groups: opt.Groups = None,
    backbone: opt.OtherBackbone = None,
    device: opt.Device = "auto",
    batch_size: Annotated[
        str | None, Option(metavar="N|auto", help="Number of images per network call; `auto` finds the fastest.")
    ] = None,
    format_: Annotated[str | None, Option("--format", help="Format: csv or parquet; that of --out by default.")] = None,
    shards: Annotated[Path | None, Option(help="Folder for the shards, which are kept; --out merges them.")] = None,
    shard_size: Annotated[int, Option(min=1, help="Number of images per shard, the unit of resuming.")] = 1024,
    restart: Annotated[bool, Option("--restart", help="Discard an unfinished run and start again.")] = False,
    workers: Annotated[int, Option(min=0, help="Number of processes that read images ahead; 0 uses a thread.")] = 0,
    compute: opt.Compute = opt.DEFAULT_COMPUTE,
) -> None:
    """Score images: one row each with score, p-value and alarm, or the reason why the file could not be scored.

    An image alarms if its p-value is at most alpha; with `--fdr` the alarms are chosen among all images of the run. To
    resume an interrupted run, give the same command again.

    Example: `gepc score det photos/new --out scores.csv --alpha 0.01`

    A million images on a cluster: `gepc score det s3://bucket/photos --out scores.parquet --engine ray --address auto`
    """
    from gepc.runs.shards import arrow, format_of
    from gepc.verdicts.decision import DecisionRule

    cluster = compute.cluster()
    kind = format_of(out, format_ or ("parquet" if cluster is not None and out is None else None))
    if "parquet" in (kind, format_of(out, None)):
        arrow()
    request = Request(detector, images, backbone, device, batch_size, shard_size, restart, workers, cluster)
    _run(request, DecisionRule(alpha, confidence, fdr, procedure), out, shards, kind, groups)


def _run(
    request: Request, rule: DecisionRule, out: Path | None, shards: Path | None, kind: str, groups: str | None
) -> None:
    """Score what is missing and write the table."""
    from gepc.images.sources import open_images
    from gepc.runs.shards import run_folder

    detector = opt.open_detector(request.detector, request.backbone, device=request.device)
    images = open_images(request.images)
    if out is not None:
        _check_writable(out)
    with _place(out, shards) as folder, run_folder(folder).held():
        labels = _labels(groups, images)
        rule.check(detector.reference_, labels)
        detector.batch_size = _batch_size(request.batch_size, detector, len(images))
        run = _open_run(folder, detector, images, labels, kind, request)
        _score(request, run, detector, images, labels)
        if out is None and shards is not None:
            note(f"{run.count} images in {len(run.shards)} shards in {folder}; the same command with --out merges them")
            return
        summary = _merge(run, lambda p_values: rule.alarms(p_values, detector.reference_, labels), out, kind)
        if shards is None:
            run.remove()
    place = "" if out is None else f"; {out}"
    note(f"{summary.images} images, {summary.alarms} alarms, {summary.failures} could not be scored{place}")
    note(f"guarantee: {rule.statement(detector.reference_)}")


@contextlib.contextmanager
def _place(out: Path | None, shards: Path | None) -> Iterator[Path]:
    """The folder of the run: the one given, or one next to the table, or a temporary one."""
    if shards is not None:
        yield shards
    elif out is not None:
        yield out.with_name(f"{out.name}.parts")
    else:
        with _kept_if_needed() as folder:
            yield folder


@contextlib.contextmanager
def _kept_if_needed() -> Iterator[Path]:
    """A temporary folder, which is kept if finished shards could not be written out."""
    place = Path(tempfile.mkdtemp(prefix="gepc-"))
    folder, keep = place / "run", False
    try:
        yield folder
    except StorageError as error:
        keep = any(folder.glob("shard-*"))
        if not keep:
            raise
        raise StorageError(
            f"{error}. Finished shards are kept: give the same command with --shards {folder} and --out FILE"
        ) from error
    finally:
        if not keep:
            shutil.rmtree(place, ignore_errors=True)


def _check_writable(out: Path) -> None:
    """Check before the first network pass that the table can be written."""
    try:
        if out.is_dir():
            raise InputError(f"{out} is a folder; --out is a file, such as {out / 'scores.csv'}")
        home = next(parent for parent in out.absolute().parents if parent.exists())
        with tempfile.TemporaryFile(dir=home):
            pass
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error.strerror or error}") from error


def _labels(groups: str | None, images: Images) -> Labels | None:
    from gepc.verdicts.conformal import group_labels

    return group_labels(opt.read_groups(groups, images), images)


def _open_run(
    folder: Path,
    detector: Detector,
    images: Images,
    labels: Labels | None,
    kind: str,
    request: Request,
) -> ScoreRun:
    """Start the run, or resume the one in the folder."""
    from gepc.runs.shards import Identity, open_run

    identity, names = Identity.of(detector, images, labels), getattr(images, "names", ())
    run = open_run(folder, identity, kind, request.shard_size, request.restart, names)
    if run.outdated:
        note(f"{run.outdated} finished shards hold images that have changed since; they are scored again")
    done = len(run.shards) - len(run.pending())
    if done:
        note(f"resuming in {folder}: {done} of {len(run.shards)} shards are finished")
    return run


def _batch_size(asked: str | None, detector: Detector, images: int) -> int:
    from gepc.runs.local import fastest_batch_size

    if asked is None:
        return detector.batch_size
    if asked == "auto":
        found = fastest_batch_size(detector, images)
        note(f"batch size {found}")
        return found
    if not asked.isdigit() or int(asked) < 1:
        raise OptionError(f"--batch-size takes a whole number of at least 1, or auto; got {asked!r}")
    return int(asked)


def _score(request: Request, run: ScoreRun, detector: Detector, images: Images, labels: Labels | None) -> None:
    """Score the missing shards."""
    from gepc.images.preprocessing import warn_about_range
    from gepc.runs.local import score_shards

    pending = run.pending()
    count = sum(len(shard) for shard in pending)
    warn_about_range(images, detector.value_range)
    estimate(detector, count, detector.cost())
    with progress("scoring", count) as advance:
        if request.cluster is None:
            score_shards(run, pending, detector, images, labels, request.workers, advance)
        else:
            _score_on_cluster(request, request.cluster, run, detector.batch_size, images, labels, advance)


def _score_on_cluster(
    request: Request,
    cluster: Cluster,
    run: ScoreRun,
    batch_size: int,
    images: Images,
    labels: Labels | None,
    advance: Callable[[int], None],
) -> None:
    from gepc.runs.cluster import DetectorPayload, ImageLocations, score_shards_on_cluster

    payload = DetectorPayload.of(request.detector, request.backbone, batch_size)
    score_shards_on_cluster(run, payload, ImageLocations.of(images, request.images), cluster, labels, advance)


def _merge(run: ScoreRun, decide: Decide, out: Path | None, kind: str) -> TableSummary:
    from gepc.runs.shards import csv_table, merge, result_table

    if out is not None:
        try:
            with result_table(out, kind) as append:
                return merge(run, decide, append)
        except StorageError as error:
            raise StorageError(
                f"{error}. All scores are kept in {run.folder}: free disk space and run the same command again, "
                f"or give --shards {run.folder} and another --out"
            ) from error
    with printing():
        summary = merge(run, decide, csv_table(sys.stdout, "\n"))
        sys.stdout.flush()  # before the shards are removed
    return summary
