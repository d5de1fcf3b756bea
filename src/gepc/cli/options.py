"""Arguments and options that several commands share, and how their values are read."""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from gepc.backbones.openai.options import PRESETS
from gepc.cli.app import note, several
from gepc.core.errors import GepcError, InputError, OptionError, raising

if TYPE_CHECKING:
    from gepc.backbones.base import Backbone
    from gepc.detector.detector import Detector
    from gepc.detector.fitted import FittedDetector
    from gepc.images.sources import Images
    from gepc.methods.base import Cost

DetectorArgument = Annotated[Path, Argument(help="Detector folder written by `gepc fit`.")]
ImagesArgument = Annotated[str, Argument(help="Folder, image file, URL (s3://bucket/dir) or array (data.npz:test_x).")]
DetectorOut = Annotated[Path, Option(help="Folder to save the detector in.")]
NewBackbone = Annotated[str, Option(help="Embedded name, diffusers folder, hub id (org/name) or OpenAI checkpoint.")]
OtherBackbone = Annotated[str | None, Option(help="Backbone to use instead of the one the detector was fitted with.")]
Device = Annotated[str, Option(help="Device: auto, cpu, cuda, cuda:1 or mps.")]
BatchSize = Annotated[int | None, Option(min=1, help="Number of images per network call.")]
Groups = Annotated[str | None, Option(help="Groups with their own guarantees: folder (its name), or file of labels.")]
Alpha = Annotated[float, Option(help="False-alarm rate: the share of in-distribution images that may raise an alarm.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON instead of text.")]


Architecture = Annotated[str | None, Option(help=f"Published network of the checkpoint: {', '.join(PRESETS)}.")]
CheckpointConfig = Annotated[Path | None, Option("--config", help="YAML or JSON file with a checkpoint's options.")]


def setting(what: str) -> Any:
    """The option `--set KEY=VALUE`, which may be repeated."""
    return Option("--set", metavar="KEY=VALUE", help=f"{what}. Repeat for several options.")


MethodSettings = Annotated[list[str] | None, setting("Option of the method or detector, for example `--set size=32`")]


def refuse_if(wrong: bool, message: str) -> None:
    """An error for an option that would have no effect, or for two that contradict each other."""
    if wrong:
        raise OptionError(message)


def parse_settings(settings: Iterable[str] | None) -> dict[str, Any]:
    """`--set key=value` pairs, with values read as YAML: `channels=[16,32]`, `steps=100`, `flips=none`."""
    import yaml

    from gepc.core.options import parse_yaml

    values: dict[str, Any] = {}
    for text in settings or ():
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise OptionError(f"--set takes key=value, such as size=32; got {text!r}")
        with raising(OptionError, f"--set {key}: cannot read the value {value!r}", yaml.YAMLError):
            values[key.strip()] = parse_yaml(value)
    return values


def checkpoint_options(
    architecture: str | None, config: Path | None, settings: Iterable[str] | None
) -> dict[str, Any] | None:
    """The options of a checkpoint from --architecture, --config and --set; None if none is given."""
    from gepc.core.options import read_yaml

    refuse_if(architecture is not None and config is not None, "give either --architecture or --config, not both")
    values = read_yaml(config) if config is not None else {}
    if architecture is not None:
        values["preset"] = architecture
    return {**values, **parse_settings(settings)} or None


def read_groups(groups: str | None, images: Images) -> list[str] | str | None:
    """`folder`, or the labels in a text file with one line per image, in the order of the images."""
    if groups is None or groups == "folder":
        return groups
    reason = (
        f"--groups takes 'folder' or a text file with a label per line; {groups} cannot be read as text: {{reason}}"
    )
    with raising(InputError, reason, OSError, UnicodeDecodeError):
        labels = Path(groups).read_text(encoding="utf-8").splitlines()
    if len(labels) != len(images):
        counts = f"{several(len(labels), 'label')} for {several(len(images), 'image')}"
        raise InputError(f"{groups} has {counts}; give a line for each image")
    return labels


@dataclass(frozen=True)
class Loading:
    """How a command loads a backbone: the options of `gepc.load_backbone`. A detector stores all but the device."""

    device: Device = "auto"
    dtype: Annotated[str, Option(help="Precision: float32, bfloat16, float16 or float64.")] = "float32"
    time_scale: Annotated[float, Option(help="Multiply the timestep that is passed to the network by this.")] = 1.0
    class_label: Annotated[int | None, Option(help="Class for a class-conditional network.")] = None
    prompt: Annotated[str | None, Option(help="Text for a text-conditional network; empty by default.")] = None
    embeddings: Annotated[Path | None, Option(help="Safetensors file with embeddings, instead of --prompt.")] = None
    variant: Annotated[str | None, Option(help="Variant of a folder's weights, for example fp16.")] = None
    act_on: Annotated[str, Option(help="For a latent backbone, where transforms act: latents or pixels.")] = "latents"
    architecture: Architecture = None
    checkpoint_config: CheckpointConfig = None

    def load(self, source: str, settings: Iterable[str] | None = None) -> Backbone:
        """Load the backbone at `source`; `settings` are `--set` options of an OpenAI checkpoint."""
        from gepc.backbones.load import load_backbone

        options = dict(vars(self))
        architecture, config = options.pop("architecture"), options.pop("checkpoint_config")
        return load_backbone(source, config=checkpoint_options(architecture, config, settings), **options)

    @staticmethod
    def refuse(settings: Mapping[str, Any]) -> None:
        """An error for options of the backbone among those of the method: they are not given with `--set`."""
        for option in fields(Loading):
            if option.name in settings:
                message = f"`{option.name}` is an option of the backbone, not of the method"
                raise OptionError(message, options=(option.name,))


DEFAULT_LOADING = Loading()


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: a parameter of the command whose type is a dataclass, such as `Loading`, becomes its fields."""
    own = inspect.signature(command, eval_str=True).parameters
    kinds: dict[str, Any] = {name: one.annotation for name, one in own.items() if is_dataclass(one.annotation)}
    groups = {name: inspect.signature(kind, eval_str=True).parameters for name, kind in kinds.items()}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {name: kind(**{one: given.pop(one) for one in groups[name]}) for name, kind in kinds.items()}
        command(**given, **made)

    spread = [one for name in own for one in (groups[name].values() if name in groups else [own[name]])]
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in spread]
    vars(run)["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def open_detector(folder: Path, backbone: str | None, batch_size: int | None = None, device: str = "auto") -> Detector:
    """The saved detector, with another backbone or batch size if one is given."""
    from gepc import load_detector

    detector = load_detector(folder, backbone, device)
    if batch_size is not None:
        detector.batch_size = batch_size
    return detector


QUICK = 500 * 32 * 32  # fewer pixels in network passes than this take less than ten seconds and need no estimate
BYTES_PER_PIXEL = 2700  # of a network call on a CPU, measured with the embedded backbones; larger networks take more
BASE_BYTES = 600 << 20  # of a process with torch and a small network


def estimate(
    backbone: Backbone,
    size: tuple[int, int] | None,
    count: int,
    cost: Cost,
    what: str = "{:,} images",
    memory: float = 1.0,
) -> None:
    """Print what `count` images or tiles of `size` (H, W) cost, if they take more than some seconds.

    The line states the number of network passes, the time, which is measured on this machine with at most a tenth of
    the passes, and on a CPU the memory. `memory` is that of the method, see `Extractor.memory`.
    """
    passes = count * (cost.forward + 2 * cost.jvp)
    if size is None or passes * size[0] * size[1] < QUICK:
        return
    seconds = passes * seconds_per_pass(backbone, size, most=max(1, passes // 10))
    if cost.encoder:
        seconds += count * cost.encoder * seconds_per_encoding(backbone, size)
    each = cost.forward + cost.jvp
    subject = what.format(count) if count > 1 else what.format(count).removesuffix("s")
    total = f"{subject} x {several(each, 'pass')} = {several(count * each, 'network pass')}"
    room = f" and {memory_of(size, count, memory) / 1e9:.1f} GB of memory" if backbone.device.type == "cpu" else ""
    note(f"{total}, about {duration(seconds)}{room}")


def memory_of(size: tuple[int, int], count: int, memory: float = 1.0) -> int:
    """Bytes of the process while `count` images of `size` go through a small network, `MAX_CHUNK_PIXELS` at a time.

    A method that takes `memory` times as much for each pixel evaluates fewer pixels at a time.
    """
    from gepc.images.batches import MAX_CHUNK_PIXELS

    pixels = int(size[0] * size[1] * memory)
    return BASE_BYTES + max(pixels, min(count * pixels, MAX_CHUNK_PIXELS)) * BYTES_PER_PIXEL


def fail_if_all(failures: int, count: int, reasons: str) -> None:
    """End the command with exit code 1 if none of its images could be scored; otherwise do nothing."""
    if count and failures == count:
        which = f"none of the {count:,} images could" if count > 1 else "the image could not"
        note(f"error: {which} be scored; {reasons}")
        raise Exit(1)


def images_for(fitted: FittedDetector, calibration_images: int) -> int:
    """How many in-distribution images `fit` needs to hold out that many of them for calibration."""
    return math.ceil(calibration_images / float(fitted.options["calibration_share"]))


def cost_per_image(cost: Cost) -> str:
    """The cost of an image, and what its letters stand for."""
    encoder = ", E: encoder passes" if cost.encoder else ""
    return f"{cost} per image (F: forward passes, J: Jacobian-vector products{encoder})"


def size_text(resize: str, size: Sequence[int]) -> str:
    """What a detector with this option `resize` sees, in words; `size` (H, W) is that of its first image."""
    from gepc.images.preprocessing import OWN_SIZE

    height, width = size
    if resize in OWN_SIZE:
        scale = "at half their size" if resize == "half" else "in their own size"
        return f"images {scale}, the first of them {width}x{height} pixels"
    return f"at {width}x{height} pixels (width x height)"


def duration(seconds: float) -> str:
    """A duration in the unit that suits it."""
    if seconds < 1.0:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} minutes" if seconds < 3 * 3600 else f"{seconds / 3600:.0f} hours"


def seconds_per_pass(backbone: Backbone, size: tuple[int, int], patience: float = 5.0, most: int = 32) -> float:
    """Seconds per image and forward pass: the best of batches of 1 to 32 that should take under `patience` seconds.

    A batch has at most `most` images, and no more pixels than a chunk of images.
    """
    from gepc.images.batches import MAX_CHUNK_PIXELS

    best, most = 0.0, min(most, MAX_CHUNK_PIXELS // (size[0] * size[1]))
    for count in (1, 1, 4, 8, 32):  # the first one is a warm-up
        if count * best <= patience and count <= max(1, most):
            seconds = _timed(backbone, backbone.network_shape(size), count, backbone.one_pass)
            best = min(best or seconds, seconds)
    return best


def seconds_per_encoding(backbone: Backbone, size: tuple[int, int]) -> float:
    """Seconds per image of the encoder of a latent backbone; the first call is a warm-up."""
    return [_timed(backbone, (backbone.channels, *size), 1, backbone.encode) for _ in range(2)][-1]


def seconds_per_jvp(backbone: Backbone, size: tuple[int, int]) -> float:
    """Seconds per image of a Jacobian-vector product together with its forward pass; the first call is a warm-up."""
    return [_timed(backbone, backbone.network_shape(size), 8, lambda x: backbone.jvp(x, 0, x)) for _ in range(2)][-1]


def _timed(backbone: Backbone, shape: tuple[int, int, int], count: int, call: Callable[[Any], object]) -> float:
    """Seconds per image of one call on `count` images; its passes are not counted."""
    import torch

    x = torch.rand((count, *shape), generator=torch.Generator().manual_seed(0))
    x = x.to(dtype=backbone.dtype, device=backbone.device)
    counted = backbone.counts
    begun = time.perf_counter()
    call(x)
    seconds = (time.perf_counter() - begun) / count
    backbone.counts = counted
    return seconds


def check_packages(what: str, extra: str, *modules: str) -> None:
    """Require the packages of an extra before the work that needs them, not after it."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise GepcError(f"{what} needs {' and '.join(missing)}; install with: pip install 'gepc[{extra}]'")
