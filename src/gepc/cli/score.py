"""`gepc score`: verdicts on any number of images, by one process, several or a cluster."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gepc.cli.app import app, note, printing, progress
from gepc.cli.detect import (
    ENGINES,
    ActorsOption,
    AddressOption,
    BackboneOption,
    CpusOption,
    DetectorArgument,
    EngineOption,
    GpusOption,
    GroupsOption,
    ImagesArgument,
    estimate,
    read_groups,
)
from gepc.core.errors import InputError, OptionError, StorageError, check_choice

if TYPE_CHECKING:
    from gepc.detector.detector import Array, Detector
    from gepc.images.sources import Images
    from gepc.runs.local import Labels
    from gepc.runs.merging import Flags, Summary
    from gepc.runs.processes import ProcessGroup
    from gepc.runs.run_folder import Run

BatchSizeOption = Annotated[
    str | None,
    typer.Option(metavar="N|auto", help="Images handed to the network at once; `auto` measures and takes the fastest."),
]
OutOption = Annotated[Path | None, typer.Option(help="A CSV or Parquet file; standard output without it.")]
FormatOption = Annotated[
    str | None, typer.Option("--format", help="csv or parquet; the ending of --out says it otherwise.")
]
ShardsOption = Annotated[
    Path | None, typer.Option(help="Keep the shards in this folder; with --out they are merged as well.")
]


@dataclass(frozen=True)
class Request:
    """How the work is done: it changes no score."""

    detector: Path
    images: str
    backbone: str | None
    engine: str
    workers: int
    dedup: bool
    address: str | None
    actors: int | None
    cpus_per_actor: float
    gpus_per_actor: float


@app.command()
def score(
    detector: DetectorArgument,
    images: ImagesArgument,
    out: OutOption = None,
    alpha: Annotated[float, typer.Option(help="False-alarm rate of the verdict.")] = 0.05,
    confidence: Annotated[
        float | None, typer.Option(help="Hold the rate for these calibration images with this probability.")
    ] = None,
    fdr: Annotated[float | None, typer.Option(help="Flag so that this share of the flags is false, at most.")] = None,
    procedure: Annotated[str, typer.Option(help="With --fdr: bh or storey.")] = "bh",
    groups: GroupsOption = None,
    backbone: BackboneOption = None,
    batch_size: BatchSizeOption = None,
    format_: FormatOption = None,
    shards: ShardsOption = None,
    shard_size: Annotated[int, typer.Option(min=1, help="Images in a shard: what a killed run loses at most.")] = 1024,
    restart: Annotated[bool, typer.Option("--restart", help="Throw an unfinished run away and begin anew.")] = False,
    as_listed: Annotated[
        bool, typer.Option("--as-listed", help="Go on with the files listed when the run was started.")
    ] = False,
    dedup: Annotated[bool, typer.Option("--dedup", help="Score images of equal content once.")] = False,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read ahead; 0 reads ahead in a thread.")] = 0,
    engine: EngineOption = "local",
    address: AddressOption = None,
    actors: ActorsOption = None,
    cpus_per_actor: CpusOption = 1.0,
    gpus_per_actor: GpusOption = 0.0,
) -> None:
    """Score images: one row each with score, p-value, alarm, and the reason where a file could not be scored.

    The alarm is p <= alpha for each image by itself; with `--fdr` it is a flag among all images of the run. A run that
    was stopped or killed goes on where it was when the same command is given again.

    Example: `gepc score det photos/new --out scores.csv --alpha 0.01`

    A million images on a cluster: `gepc score det s3://bucket/photos --out scores.parquet --engine ray --address auto`
    """
    from gepc import load_detector
    from gepc.images.sources import open_images
    from gepc.runs.processes import team
    from gepc.runs.run_folder import listed
    from gepc.runs.tables import arrow, format_of

    check_choice("engine", engine, ENGINES)
    kind = format_of(out, format_ or ("parquet" if engine == "ray" and out is None else None))
    if "parquet" in (kind, format_of(out, None)):
        arrow()
    cluster = (address, actors, cpus_per_actor, gpus_per_actor)
    request = Request(detector, images, backbone, engine, workers, dedup, *cluster)
    us = team()
    if us.size > 1 and (engine == "ray" or (out is None and shards is None)):
        raise OptionError("several processes need --engine local and --out or --shards")
    loaded = load_detector(detector, backbone)
    found = None if as_listed else open_images(images)  # what was listed may be gone by now
    if out is not None and us.is_first:
        _check_writable(out)
    with _place(out, shards) as folder, _held(folder) if us.is_first else contextlib.nullcontext():
        collection = listed(folder) if found is None else found
        labels = _labels(groups, collection, loaded)
        rule = Rule(loaded, alpha, confidence, fdr, procedure, labels)
        loaded.batch_size = _batch_size(batch_size, loaded, len(collection))
        run = _open_run(us, folder, loaded, collection, labels, kind, shard_size, restart)
        _score(request, us, run, loaded, collection, labels)
        if not us.is_first:
            return
        if out is None and shards is not None:
            note(f"{run.count} images in {len(run.shards)} shards in {folder}; the same command with --out merges them")
            return
        summary = _merge(run, rule, out, kind)
        if shards is None:
            run.remove()
    place = "" if out is None else f"; {out}"
    note(f"{summary.images} images, {summary.alarms} alarms, {summary.failures} could not be scored{place}")
    note(f"guarantee: {rule.statement()}")


@contextlib.contextmanager
def _place(out: Path | None, shards: Path | None) -> Iterator[Path]:
    """The run's folder: as asked for, else beside the table until it is finished, else a temporary one."""
    if shards is not None:
        yield shards
    elif out is not None:
        yield out.with_name(f"{out.name}.parts")
    else:
        with _kept_if_needed() as folder:
            yield folder


@contextlib.contextmanager
def _kept_if_needed() -> Iterator[Path]:
    """A temporary folder; where something could not be written, what was computed stays."""
    place = Path(tempfile.mkdtemp(prefix="gepc-"))
    folder, keep = place / "run", False
    try:
        yield folder
    except StorageError as error:
        keep = any(folder.glob("shard-*"))
        if not keep:
            raise
        raise StorageError(
            f"{error}. What is finished is kept: give the same command with --shards {folder} and --out FILE"
        ) from error
    finally:
        if not keep:
            shutil.rmtree(place, ignore_errors=True)


def _check_writable(out: Path) -> None:
    """Whether the table can be made, before the first pass."""
    try:
        if out.is_dir():
            raise InputError(f"{out} is a folder; --out is a file, such as {out / 'scores.csv'}")
        home = next(parent for parent in out.absolute().parents if parent.exists())
        with tempfile.TemporaryFile(dir=home):
            pass
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error.strerror or error}") from error


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Keep a second command out of the run's folder; one that came to nothing leaves no empty folder behind."""
    from gepc.core.files import only_writer

    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; give another place")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error.strerror or error}") from error
    try:
        with only_writer(folder):
            yield
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _labels(groups: str | None, images: Images, detector: Detector) -> Labels | None:
    import numpy as np

    from gepc.verdicts.conformal import group_labels

    labels = group_labels(read_groups(groups, images), images, np.arange(len(images)))
    detector.reference_.check(labels)
    return labels


def _open_run(
    us: ProcessGroup,
    folder: Path,
    detector: Detector,
    images: Images,
    labels: Labels | None,
    kind: str,
    shard_size: int,
    restart: bool,
) -> Run:
    """The first process makes or takes up the run, the others find it there."""
    from gepc.runs.run_folder import Identity, join_run, open_run

    identity = Identity.of(detector, images, labels)
    if not us.is_first:
        us.wait()
        return join_run(folder, identity)
    run = open_run(folder, identity, images, kind, shard_size, restart)
    done = len(run.shards) - len(run.pending())
    if done:
        note(f"going on in {folder}: {done} of {len(run.shards)} shards are finished")
    us.wait()
    return run


def _batch_size(asked: str | None, detector: Detector, images: int) -> int:
    from gepc.runs.batch_size import fastest_for

    if asked is None:
        return detector.batch_size
    if asked == "auto":
        found = fastest_for(detector, images)
        note(f"batch size {found}")
        return found
    if not asked.isdigit() or int(asked) < 1:
        raise OptionError(f"--batch-size is a whole number of at least 1, or auto; got {asked!r}")
    return int(asked)


def _score(
    request: Request, us: ProcessGroup, run: Run, detector: Detector, images: Images, labels: Labels | None
) -> None:
    """Compute this process' share of what is missing, and wait until the others have theirs."""
    from gepc.images.preprocessing import warn_about_range
    from gepc.runs.local import score_shards

    pending = us.share(run.pending())
    count = sum(len(shard) for shard in pending)
    if us.is_first:
        warn_about_range(images, detector.value_range)
        estimate(detector, count, detector.cost().forward, detector.cost().jvp)
    with progress("scoring", count) as advance:
        if request.engine == "ray":
            _score_on_cluster(request, run, detector.batch_size, images, labels, advance)
        else:
            score_shards(run, pending, detector, images, labels, request.workers, request.dedup, advance)
    us.wait()


def _score_on_cluster(
    request: Request,
    run: Run,
    batch_size: int,
    images: Images,
    labels: Labels | None,
    advance: Callable[[int], None],
) -> None:
    from gepc.runs.cluster import Cluster, DetectorPayload, Source, score_shards_on_cluster

    recipe = DetectorPayload.of(request.detector, request.backbone, batch_size, request.dedup)
    cluster = Cluster(request.address, request.actors, request.cpus_per_actor, request.gpus_per_actor)
    score_shards_on_cluster(run, recipe, Source.of(images, request.images), cluster, labels, advance)


def _merge(run: Run, rule: Rule, out: Path | None, kind: str) -> Summary:
    from gepc.runs.merging import merge
    from gepc.runs.tables import csv_table, table

    if out is not None:
        try:
            with table(out, kind) as append:
                return merge(run, rule.flags, append)
        except StorageError as error:
            raise StorageError(
                f"{error}. Every image is scored, in {run.folder}: make room and run the same command again, "
                f"or give --shards {run.folder} and another --out"
            ) from error
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="surrogateescape")  # names of files that are no text come out as they are
    with printing():
        summary = merge(run, rule.flags, csv_table(sys.stdout, "\n"))
        sys.stdout.flush()  # while the shards are there
    return summary


class Rule:
    """Which rows alarm, and what may be said of the alarms."""

    def __init__(
        self,
        detector: Detector,
        alpha: float,
        confidence: float | None,
        fdr: float | None,
        procedure: str,
        labels: Labels | None = None,
    ) -> None:
        from gepc.verdicts.decision import DecisionRule
        from gepc.verdicts.multiple_testing import discoveries

        self.detector, self.alpha, self.confidence = detector, alpha, confidence
        self.fdr, self.procedure = fdr, procedure
        if fdr is not None:
            discoveries([0.5], fdr, procedure)  # refuses a bad rate before any work
        else:
            self.limits = DecisionRule(alpha, confidence).limits(detector.reference_, labels)

    def flags(self, p_values: Array, scored: Flags) -> Flags:
        """Which images alarm; one that could not be scored does not."""
        import numpy as np

        from gepc.verdicts.multiple_testing import discoveries

        flags = np.zeros(len(p_values), dtype=bool)
        if self.fdr is not None:
            flags[scored] = discoveries(p_values[scored], self.fdr, self.procedure)
        else:
            flags[scored] = (p_values <= self.limits)[scored]
        return flags

    def statement(self) -> str:
        """The promise that goes with the alarms."""
        if self.fdr is not None:
            return f"on average at most {self.fdr:g} of the flags are false ({self.procedure})"
        if self.confidence is not None:
            return (
                f"with probability {self.confidence:g} over calibration sets, at most {self.alpha:g} "
                "of in-distribution images raise an alarm"
            )
        return str(self.detector.guarantee(self.alpha))
