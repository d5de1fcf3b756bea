"""`gepc symmetries`: which transforms are symmetries of normal images, and what that means for the detector."""

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from gepc.cli import options as opt
from gepc.cli.app import note, say, text_table
from gepc.core.files import write_json
from gepc.core.options import DEFAULT_BACKBONE

MEANING = """
holds: whether the images are compatible with this symmetry. A test that does not reject proves nothing. Where the
symmetry does not hold, the residual also measures the orientation of the data, not only the errors of the network.
operator_error: how much the transform and its inverse change the noisy image, without the network.
power: AUROC of synthetic outliers by the residual alone; 0.5 is chance.

To fit with the chosen transforms and weights, add --set group=auto to `gepc fit`, or
"""


@opt.with_groups
def symmetries(
    images: Annotated[str, Argument(help="Normal images: a folder, or an array: data.npz:train_x.")],
    out: Annotated[Path | None, Option(help="Folder for symmetries.json and a plot of the residual by angle.")] = None,
    backbone: opt.NewBackbone = DEFAULT_BACKBONE,
    count: Annotated[int, Option(min=16, help="Number of images to use, at most.")] = 400,
    size: Annotated[int | None, Option(help="Side of the images that the network sees; its own by default.")] = None,
    loading: opt.Loading = opt.DEFAULT_LOADING,
    as_json: opt.AsJson = False,
) -> None:
    """Test which transforms leave the distribution of your normal images unchanged, and which a detector should use.

    A two-sample test compares the images with transformed ones, at a family-wise error rate of 0.05 (Holm's procedure).
    The residual of the network is measured on at most 64 images. Out-of-distribution images are not needed.

    Example: `gepc symmetries photos/normal --out symmetries`
    """
    from gepc.detector.registry import GEPC
    from gepc.images.sources import open_images
    from gepc.methods.gepc import GepcExtractor
    from gepc.methods.symmetries import choose, read_batch

    detector = GEPC(loading.load(backbone), size=size)
    method = detector.extractor
    assert isinstance(method, GepcExtractor)
    batch = read_batch(open_images(images), detector.preprocessing(), detector.seed, detector.batch_size, most=count)
    group, evidence = choose(method, detector.backbone, batch)
    chosen, transforms = list(group.names[1:]), [item.as_dict() for item in evidence]
    facts = {"images": len(batch), "group": chosen, "transforms": transforms}
    if as_json:
        say(json.dumps(facts, indent=2))
    else:
        say(text_table([tuple(row.values()) for row in transforms], list(transforms[0])))
        say(f"{MEANING}--set 'group={json.dumps(chosen)}'")
    if out is None:
        return
    from gepc.detector.plots import save
    from gepc.lab.angles import angle_figure, residual_by_angle

    out.mkdir(parents=True, exist_ok=True)
    save(angle_figure({"normal images": residual_by_angle(method, detector.backbone, batch)}), out / "angles")
    write_json(out / "symmetries.json", facts)
    note(f"wrote {out / 'symmetries.json'} and {out / 'angles.png'}")
