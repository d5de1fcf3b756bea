"""Arguments and options that several commands share, and how their values are read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from gepc.core.errors import InputError, OptionError, check_choice

if TYPE_CHECKING:
    from gepc.detector.detector import Detector
    from gepc.features.extraction import Engine as FeatureEngine
    from gepc.images.sources import Images

DetectorArgument = Annotated[Path, Argument(help="Detector folder written by `gepc fit`.")]
ImagesArgument = Annotated[
    str, Argument(help="Folder of images, image file, URL such as s3://bucket/photos, or array: data.npz:test_x.")
]
DetectorOut = Annotated[Path, Option(help="Folder to save the detector in.")]
NewBackbone = Annotated[str, Option(help="Name of an embedded backbone, diffusers folder, or OpenAI checkpoint (.pt).")]
OtherBackbone = Annotated[str | None, Option(help="Backbone to use instead of the one the detector was fitted with.")]
BatchSize = Annotated[int | None, Option(min=1, help="Number of images per network call.")]
Groups = Annotated[
    str | None,
    Option(help="Groups to calibrate separately: `folder`, or a text file with one label per image."),
]
Alpha = Annotated[float, Option(help="False-alarm rate: the share of in-distribution images that may alarm.")]
Cache = Annotated[Path, Option(help="Folder for features that are reused between runs.")]
DEFAULT_CACHE = Path(".gepc-cache")
Engine = Annotated[str, Option(help="Where network passes run: local (this machine) or ray (a cluster).")]
ENGINES = ("local", "ray")
Address = Annotated[str | None, Option(help="Ray cluster address; omit to start a local cluster.")]
Actors = Annotated[int | None, Option(min=1, help="Maximum number of Ray actors.")]
Cpus = Annotated[float, Option(min=0.1, help="Number of CPUs per Ray actor.")]
Gpus = Annotated[float, Option(min=0.0, help="Number of GPUs per Ray actor.")]


def setting(what: str) -> Any:
    """The option `--set KEY=VALUE`, which may be repeated."""
    return Option("--set", metavar="KEY=VALUE", help=f"{what}. Repeat for several options.")


MethodSettings = Annotated[
    list[str] | None, setting("Option of the method or of the detector, for example `--set size=32`")
]


def parse_settings(settings: Iterable[str] | None) -> dict[str, Any]:
    """`--set key=value` pairs, with values read as YAML: `channels=[16,32]`, `steps=100`, `flips=none`."""
    import yaml

    values: dict[str, Any] = {}
    for text in settings or ():
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise OptionError(f"--set takes key=value, got {text!r}")
        try:
            values[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise OptionError(f"--set {key}: cannot read the value {value!r}") from error
    return values


def read_groups(groups: str | None, images: Images) -> list[str] | str | None:
    """`folder`, or the labels in a text file with one line per image, in the order of the images."""
    if groups is None or groups == "folder":
        return groups
    try:
        labels = Path(groups).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"--groups takes 'folder' or a text file with one label per line; {groups}: {error}"
        ) from error
    if len(labels) != len(images):
        raise InputError(f"{groups} has {len(labels)} labels for {len(images)} images")
    return labels


def open_detector(folder: Path, backbone: str | None, batch_size: int | None = None) -> Detector:
    """The saved detector, with another backbone or batch size if one is given."""
    from gepc import load_detector

    detector = load_detector(folder, backbone)
    if batch_size is not None:
        detector.batch_size = batch_size
    return detector


def feature_engine(
    engine: str, address: str | None, actors: int | None, cpus_per_actor: float, gpus_per_actor: float
) -> FeatureEngine | None:
    """What computes features on a cluster; None for this process."""
    check_choice("engine", engine, ENGINES)
    if engine == "local":
        return None
    from gepc.runs.cluster import Cluster, FeaturesOnCluster

    return FeaturesOnCluster(Cluster(address, actors, cpus_per_actor, gpus_per_actor))
