"""`gepc score`: scores, p-values and alarms for any number of images, on one machine or on a cluster."""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from gepc.cli import options as opt
from gepc.cli.app import note, printing, progress, say, several, text_table
from gepc.core.errors import InputError, OptionError, StorageError, check_choice
from gepc.core.files import check_writable

if TYPE_CHECKING:
    from gepc.conformal.decision import DecisionRule
    from gepc.conformal.p_values import Labels
    from gepc.detector.fitted import FittedDetector
    from gepc.runs.shards import Decide, ScoreRun, Shard


def score(
    detector: opt.DetectorArgument,
    images: opt.ImagesArgument,
    out: Annotated[Path | None, Option(help="CSV or Parquet file; standard output by default.")] = None,
    alpha: Annotated[float | None, Option(help="False-alarm rate of each image; 0.05 by default.")] = None,
    confidence: Annotated[float | None, Option(help="Probability that alpha holds for this calibration set.")] = None,
    fdr: Annotated[float | None, Option(help="False-discovery rate to control, instead of --alpha.")] = None,
    procedure: Annotated[str, Option(help="Procedure for --fdr: bh (Benjamini-Hochberg) or storey.")] = "bh",
    explain: Annotated[bool, Option("--explain", help="Add the most unusual part of the score, as reason.")] = False,
    groups: opt.Groups = None,
    backbone: opt.OtherBackbone = None,
    device: opt.Device = "auto",
    batch_size: opt.BatchSize = None,
    shards: Annotated[Path | None, Option(help="Folder for the shards, which are kept; --out merges them.")] = None,
    shard_size: Annotated[int, Option(min=1, help="Number of images per shard, the unit of resuming.")] = 1024,
    restart: Annotated[bool, Option("--restart", help="Discard an unfinished run and start again.")] = False,
    workers: Annotated[int, Option(min=1, help="Number of threads that read images ahead.")] = 1,
    engine: Annotated[str, Option(help="Where network passes run: local (this machine) or ray (a cluster).")] = "local",
    address: Annotated[str | None, Option(help="Ray cluster address; omit to start a local cluster.")] = None,
    actors: Annotated[int | None, Option(min=1, help="Maximum number of Ray actors.")] = None,
    cpus_per_actor: Annotated[float, Option(min=0.1, help="Number of CPUs per Ray actor.")] = 1.0,
    gpus_per_actor: Annotated[float, Option(min=0.0, help="Number of GPUs per Ray actor.")] = 0.0,
) -> None:
    """Score images: one row each with score, p-value and alarm, or the reason why the file could not be scored.

    An image raises an alarm if its p-value is at most alpha. With `--fdr`, the alarms are chosen among all images of
    the run. To resume an interrupted run, give the same command again.

    Example: `gepc score det photos/new --out scores.csv --alpha 0.01`

    A million images on a cluster: `gepc score det s3://bucket/photos --out scores.parquet --engine ray --address auto`
    """
    from gepc.conformal.decision import DecisionRule
    from gepc.conformal.p_values import group_labels
    from gepc.images.preprocessing import warn_about_range
    from gepc.images.sources import open_images
    from gepc.runs.cluster import Cluster, DetectorPayload, score_shards_on_cluster
    from gepc.runs.shards import Identity, arrow, format_of, open_run, run_folder, score_shards

    cluster = Cluster(address, actors, cpus_per_actor, gpus_per_actor)
    check_choice("engine", engine, ("local", "ray"))
    opt.refuse_if(engine == "local" and cluster != Cluster(), "--address and the options of actors need --engine ray")
    opt.refuse_if(engine == "ray" and workers != 1, "--workers needs --engine local; actors have threads of their own")
    opt.refuse_if(fdr is None and procedure != "bh", "--procedure needs --fdr")
    opt.refuse_if(fdr is not None and alpha is not None, "give either --alpha or --fdr, not both")
    rule = DecisionRule(0.05 if alpha is None else alpha, confidence, fdr, procedure)
    if out is not None and format_of(out) == "parquet":
        arrow()
    fitted, collection = opt.open_detector(detector, backbone, batch_size, device).fitted, open_images(images)
    if explain and fitted.score_from == "map":
        raise OptionError("--explain: the score of this detector is that of its map; `gepc map` shows where it is high")
    if out is not None:
        if out.is_dir():
            raise InputError(f"{out} is a folder; --out is a file, such as {out / 'scores.csv'}")
        check_writable(out)
    with _place(out, shards) as folder, run_folder(folder).held():
        labels = group_labels(opt.read_groups(groups, collection), collection)
        shortfall = _shortfall(rule, fitted, labels)
        identity, names = Identity.of(fitted, collection, labels), getattr(collection, "names", ())
        run = open_run(folder, identity, shard_size, restart, names)
        pending = _pending(run)
        count = sum(map(len, pending))
        opt.estimate(fitted.backbone, fitted.input_size, count, fitted.cost(), memory=fitted.method.memory)
        with progress("scoring", count) as advance:
            if engine == "local":
                score_shards(run, pending, fitted, collection, labels, workers, advance)
            else:
                warn_about_range(collection, fitted.preprocessing.value_range)
                payload = DetectorPayload.of(detector, backbone, fitted.batch_size)
                score_shards_on_cluster(run, payload, collection, images, cluster, labels, advance)
        if out is None and shards is not None:
            counts = f"{several(run.count, 'image')} in {several(len(run.shards), 'shard')}"
            note(f"{counts} in {folder}; the same command with --out merges them")
            return
        decide = None if shortfall else partial(rule.decide, fitted.reference, labels)
        failures = _merge(run, decide, out, explain)
        if shards is None:
            run.remove()
    note(shortfall or f"guarantee: {rule.statement(fitted.reference)}")
    opt.fail_if_all(failures, run.count, "the column error has the reasons")


def _shortfall(rule: DecisionRule, fitted: FittedDetector, labels: Labels | None) -> str | None:
    """Why no alarm can be decided with so few calibration images, and what to do; None if they suffice."""
    from gepc.core.errors import TooFewImagesError

    try:
        rule.check(fitted.reference, labels)
    except TooFewImagesError as error:
        fit = f"Fit on at least {opt.images_for(fitted, error.needed)} images"
        if fitted.reference.grouped:
            fit = "This is the smallest group: fit on more images of it"
        possible = math.ceil(100.0 * error.smallest) / 100.0
        advice = f"{fit}, or give --alpha {possible:g}; the scores and p-values are complete"
        return f"no alarms were decided: {error}. {advice}"
    return None


@contextlib.contextmanager
def _place(out: Path | None, shards: Path | None) -> Iterator[Path]:
    """The folder of the run: the one given, or one next to the table, or a temporary one.

    A temporary folder is kept if its finished shards could not be written out.
    """
    if shards is not None or out is not None:
        yield shards or Path(f"{out}.parts")
        return
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


def _pending(run: ScoreRun) -> list[Shard]:
    """The shards to score, after a word about those that are finished."""
    if run.outdated:
        note(f"scored again, because images have changed since: {several(run.outdated, 'finished shard')}")
    pending = run.pending()
    if len(pending) < len(run.shards):
        note(f"resuming in {run.folder}: {run.finished} ({several(len(run.shards[0]), 'image')} per shard)")
    return pending


def _merge(run: ScoreRun, decide: Decide | None, out: Path | None, explain: bool) -> int:
    """Write the table of a finished run and return the number of images that could not be scored."""
    from gepc.runs.shards import csv_table, merge, result_table

    try:
        if out is not None:
            with result_table(out, explain) as append:
                alarms, failures = merge(run, decide, append)
        else:
            with printing():
                alarms, failures = merge(run, decide, csv_table(sys.stdout, "\n", explain))
                sys.stdout.flush()  # before the shards are removed
    except StorageError as error:
        if out is None:
            raise
        raise StorageError(
            f"{error}. All scores are kept in {run.folder}: free disk space and run the same command again, "
            f"or give --shards {run.folder} and another --out"
        ) from error
    _note_counts(run.count, None if decide is None else alarms, failures, out)
    return failures


def _note_counts(count: int, alarms: int | None, failures: int, out: Path | None) -> None:
    """Print how many images, alarms and failures there are; `alarms` is None where none could be decided."""
    decided = "" if alarms is None else f" {several(alarms, 'alarm')},"
    place = "" if out is None else f"; {out}"
    note(f"{several(count, 'image')},{decided} {failures} could not be scored{place}")


def report(
    table: Annotated[Path, Argument(help="Table of scores, written by `gepc score` or `gepc watch`.")],
    out: Annotated[Path, Option(help="Picture: a file that ends in .png, .svg or .pdf.")],
    most: Annotated[int, Option(min=0, help="Number of the most unusual images to list.")] = 10,
) -> None:
    """Draw the scores, p-values and alarms of a table, and list its most unusual images.

    Example: `gepc report scores.csv --out scores.png`
    """
    from gepc.core.files import replacing
    from gepc.detector.plots import plot_results
    from gepc.runs.shards import read_table

    kind = out.suffix.lower().removeprefix(".")
    check_choice("suffix of --out", kind, ("png", "svg", "pdf"))
    rows = read_table(table)
    figure = plot_results(
        [result.score for result, _ in rows], [result.p_value for result, _ in rows], [bool(alarm) for _, alarm in rows]
    )
    with replacing(out) as draft:
        figure.savefig(draft, format=kind, dpi=150)
    scored = sorted((row for row in rows if row[0].error is None), key=lambda row: -row[0].score)
    listed = [
        (result.name, f"{result.score:.4g}", f"{result.p_value:.4g}", "alarm" if alarm else "")
        for result, alarm in scored[:most]
    ]
    if listed:
        say(text_table(listed, ("most unusual", "score", "p-value", "")))
    decided = [alarm for _, alarm in rows if alarm is not None]
    _note_counts(len(rows), sum(decided) if decided else None, len(rows) - len(scored), out)
