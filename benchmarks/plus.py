"""gepc+ against GEPC and its own ablations on every pair of a protocol.

    python benchmarks/plus.py small32 --data data/ --out results/plus --seeds 0,1,2,3,4

The features are kept in the cache: an interrupted run resumes, and a second one needs no network pass.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from plus_designs import collect_plus, passes_needed, tables

import gepc
from gepc.core.allocator import keep_freed_memory
from gepc.core.tables import write_tables
from gepc.lab.bench.evaluate import Benchmark
from gepc.lab.bench.protocol import load_protocol
from gepc.methods.extraction import FeatureCache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("protocol", help="a YAML file or a name, such as small32")
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data sets")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the tables")
    parser.add_argument("--backbone", help="use this backbone instead of the protocol's")
    parser.add_argument("--seeds", default="0", help="noise seeds, separated by commas")
    parser.add_argument("--train", type=int, help="ID-train images, instead of the protocol's number")
    parser.add_argument("--test", type=int, help="test images of each set, instead of the protocol's number")
    parser.add_argument("--lean", action="store_true", help="only the transforms of the presets, without GEPC's others")
    parser.add_argument("--cache", type=Path, default=Path(".gepc-cache"))
    options = parser.parse_args()
    keep_freed_memory()

    given = {"backbone": options.backbone, "train_images": options.train, "test_images": options.test}
    overrides = {name: value for name, value in given.items() if value is not None}
    seeds = [int(seed) for seed in options.seeds.split(",")]
    protocol = load_protocol(options.protocol, {**overrides, "seeds": seeds})
    backbone = gepc.load_backbone(protocol.backbone)
    benchmark = Benchmark.open(protocol, backbone, options.data, FeatureCache(options.cache))
    total, done = passes_needed(benchmark, options.lean), 0

    def report(passes: int) -> None:
        nonlocal done
        done += passes
        print(f"\r{done:,} of {total:,} passes", end="", flush=True)

    bench = collect_plus(benchmark, report, options.lean)
    print()
    print(write_tables(options.out, "plus", tables(bench), {"protocol": dataclasses.asdict(protocol)}))


if __name__ == "__main__":
    main()
