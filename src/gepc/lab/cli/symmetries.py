"""`gepc symmetries`: which transforms are symmetries of normal images, and what that means for the detector."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from gepc.cli import options as opt
from gepc.cli.app import note, say, text_table
from gepc.core.files import write_json
from gepc.core.options import DEFAULT_BACKBONE

if TYPE_CHECKING:
    from gepc.methods.symmetries import Evidence

COLUMNS = ("transform", "p-value", "symmetry", "residual", "operator error", "power", "weight")


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
    """Test which transforms leave the law of your normal images unchanged, and which of them a detector should use.

    A two-sample test compares the images with moved ones, at a family-wise error rate of 0.05 (Holm's procedure). The
    residual of the network is measured on at most 64 images. No out-of-distribution image is needed.

    Example: `gepc symmetries photos/normal --out symmetries`
    """
    from gepc.detector.registry import GEPC
    from gepc.images.sources import open_images
    from gepc.methods.base import Batch
    from gepc.methods.gepc import GepcExtractor
    from gepc.methods.symmetries import NETWORK_IMAGES, choose, read_batch

    detector = GEPC(loading.load(backbone), size=size)
    method, seed, rows = detector.extractor, detector.seed, detector.batch_size
    assert isinstance(method, GepcExtractor)
    batch = read_batch(open_images(images), detector.preprocessing(), seed, rows, most=count)
    group, evidence = choose(method, detector.backbone, batch)
    facts = {"images": len(batch), "group": list(group.names[1:]), "transforms": [item.as_dict() for item in evidence]}
    say(json.dumps(facts, indent=2) if as_json else _text(evidence, len(batch), group.names[1:]))
    if out is None:
        return
    from gepc.lab.angles import angle_figure, residual_by_angle
    from gepc.lab.report.figures import save

    few = Batch(batch.images[: NETWORK_IMAGES // 2], batch.keys[: NETWORK_IMAGES // 2], seed, rows)
    figure = angle_figure({"normal images": residual_by_angle(method, detector.backbone, few)})
    out.mkdir(parents=True, exist_ok=True)
    save(figure, out / "angles")
    write_json(out / "symmetries.json", facts)
    note(f"wrote {out / 'symmetries.json'} and {out / 'angles.png'}")


def _text(evidence: Sequence[Evidence], count: int, group: Sequence[str]) -> str:
    rows = [
        (
            item.action,
            f"{item.p_value:.3f}",
            "holds" if item.holds else "broken",
            f"{item.residual:.4f}",
            f"{item.operator_error:.1e}",
            f"{item.power:.3f}",
            f"{item.weight:g}" if item.weight else "-",
        )
        for item in evidence
    ]
    broken = [item.action for item in evidence if not item.holds]
    lines = [text_table(rows, COLUMNS), ""]
    if broken:
        lines += [
            f"The images are not invariant under {', '.join(broken)}: there the residual measures the orientation of "
            "the data, too, and not only what the network does not know."
        ]
    lines += [
        f"The other transforms are compatible with {count} images; a test that does not reject is no proof. Power is "
        "the AUROC on synthetic outliers, 0.5 is chance. To fit with the chosen transforms and their weights:",
        "gepc fit NORMAL --out DETECTOR --method gepc --set group=auto",
        f"or, as chosen here: --set 'group={json.dumps(list(group))}'",
    ]
    return "\n".join(lines)
