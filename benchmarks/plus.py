"""gepc+ against GEPC and its own terms, and AUROC against passes: for every pair of a protocol, with spread.

    python benchmarks/plus.py small32 --data data/ --out results/plus --seeds 0,1,2,3,4

The features are kept in the cache: an interrupted run goes on, and a second one costs no network pass.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gepc
from gepc.bench.figures import auroc_over_passes
from gepc.bench.passes import PassesBench
from gepc.bench.plus import collect_plus, passes_needed, tables
from gepc.bench.protocol import load_protocol
from gepc.core.allocator import keep_freed_memory
from gepc.core.files import replacing
from gepc.core.tables import write_tables
from gepc.features.extraction import FeatureCache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("protocol", help="a YAML file or a name, such as small32")
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data sets")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the tables")
    parser.add_argument("--backbone", help="instead of the protocol's")
    parser.add_argument("--seeds", default="0", help="noise seeds with commas between")
    parser.add_argument("--train", type=int, help="ID-train images, instead of the protocol's number")
    parser.add_argument("--test", type=int, help="test images of each set, instead of the protocol's number")
    parser.add_argument("--cache", type=Path, default=Path(".gepc-cache"))
    options = parser.parse_args()
    keep_freed_memory()

    given = {"backbone": options.backbone, "train_images": options.train, "test_images": options.test}
    overrides = {name: value for name, value in given.items() if value is not None}
    seeds = [int(seed) for seed in options.seeds.split(",")]
    protocol = load_protocol(options.protocol, {**overrides, "seeds": seeds})
    backbone = gepc.load_backbone(protocol.backbone)
    total, done = passes_needed(protocol, backbone), 0

    def report(passes: int) -> None:
        nonlocal done
        done += passes
        print(f"\r{done:,} of {total:,} passes", end="", flush=True)

    bench = collect_plus(protocol, backbone, options.data, FeatureCache(options.cache), report)
    print()
    passes = PassesBench(bench).table()
    found = [*tables(bench), passes]
    text = write_tables(options.out, "plus", found, {"protocol": protocol.as_dict()})
    with replacing(options.out / "passes.png") as draft:
        auroc_over_passes(passes).savefig(draft, format="png", dpi=200)
    print(text)


if __name__ == "__main__":
    main()
