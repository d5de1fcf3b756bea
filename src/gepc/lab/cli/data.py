"""`gepc data`: download data sets for benchmarks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from gepc.cli.app import new_app, progress, say

data = new_app(name="data", help="Download the data sets of the paper from their owners.")

NAMES = "cifar10, cifar100, svhn, celeba"


@data.command()
def get(
    names: Annotated[list[str], Argument(metavar="NAME...", help=f"Data sets: {NAMES}.")],
    to: Annotated[Path, Option(help="Folder for the data sets; `gepc bench --data` takes it.")],
    mirror: Annotated[str | None, Option(help="Address with the same files, instead of the owners' addresses.")] = None,
) -> None:
    """Download data sets, check them, and put them where `gepc bench` looks for them.

    An interrupted download continues when the command is run again. CelebA has to be downloaded by hand; the command
    says from where.

    Example: `gepc data get cifar10 cifar100 svhn --to data`
    """
    for name, counts in fetch_all(names, to, mirror).items():
        say(f"{name}: {counts['train']:,} training and {counts['test']:,} test images in {to}")


def fetch_all(names: Sequence[str], to: Path, mirror: str | None) -> dict[str, dict[str, int]]:
    """Download what is missing: name -> number of images of each split."""
    from gepc.lab.datasets.download import fetch, missing_files

    sizes = {name: sum(one.size for one in missing_files(name, to)) for name in names}
    found = {}
    for name, size in sizes.items():
        with progress(f"{name}, bytes", size) as advance:
            found[name] = fetch(name, to, mirror, advance)
    return found
