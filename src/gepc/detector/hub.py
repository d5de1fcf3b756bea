"""Detectors on the Hugging Face hub: the folder that `save` writes, with a model card made from it."""

from collections.abc import Mapping
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory
from typing import Any

from gepc._version import __version__
from gepc.conformal.p_values import Guarantee
from gepc.core.errors import StorageError, first_line
from gepc.core.files import read_json, write_json, write_text
from gepc.core.tables import markdown_table
from gepc.detector.fitted import FittedDetector
from gepc.detector.storage import DESCRIPTION, save_detector

_TAGS = ["out-of-distribution-detection", "anomaly-detection", "diffusion", "conformal-prediction"]


def push(fitted: FittedDetector, repo_id: str, card: Mapping[str, Any], **options: Any) -> str:
    """Upload a fitted detector and its model card; the address of the repository."""
    from huggingface_hub import HfApi

    with TemporaryDirectory() as place:
        folder = Path(place) / "detector"
        save_detector(fitted, folder)
        facts = read_json(folder / DESCRIPTION)
        source = facts["backbone"]["source"]
        if source is not None and Path(source).exists():  # others have no use for a path on this machine
            facts["backbone"]["source"] = Path(source).name
            write_json(folder / DESCRIPTION, facts)
        write_text(folder / "README.md", model_card(repo_id, facts, **card))
        try:
            url = HfApi().create_repo(repo_id, exist_ok=True, **options)
            HfApi().upload_folder(repo_id=repo_id, folder_path=folder, commit_message=f"gepc {__version__}")
        except (OSError, ValueError) as error:  # the errors of the hub client derive from these
            raise StorageError(f"{repo_id} cannot be uploaded: {first_line(error)}") from error
    return str(url)


def model_card(
    repo_id: str, facts: Mapping[str, Any], fitted_on: str, figures: Mapping[str, object], licence: str | None
) -> str:
    """The card of a detector from its description, with the metadata of huggingface_hub's `ModelCardData`."""
    from huggingface_hub import ModelCardData

    backbone, fitted, cost, promise = facts["backbone"], facts["fitted"], facts["cost"], facts["guarantee"]
    about = {
        "method": facts["method"],
        "fitted on": f"{fitted_on} ({fitted['fit_images']} images)",
        "calibrated on": f"{fitted['calibration_images']} further images",
        "backbone": f"{backbone['source'] or backbone['family']}, SHA-256 `{backbone['sha256']}`",
        "cost": f"{cost['forward']} forward passes, {cost['jvp']} Jacobian-vector products per image",
        "guarantee": "none: too few calibration images for alpha 0.05" if promise is None else Guarantee(**promise),
        **figures,
    }
    data = ModelCardData(library_name="gepc", license=licence, tags=_TAGS, pipeline_tag="image-classification")
    table = markdown_table(("", ""), [(name, str(value)) for name, value in about.items()])
    template = Template((Path(__file__).parent / "model_card.md").read_text(encoding="utf-8"))
    return template.substitute(repo_id=repo_id, metadata=data.to_yaml(), version=__version__, table=table)
