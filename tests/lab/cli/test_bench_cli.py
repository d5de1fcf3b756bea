"""gepc bench and gepc ablate through the command line, on a tiny network and made-up data sets."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from crashes import changes, crash, tree
from toys import as_uint8, pictures

from gepc.cli.app import run


@pytest.fixture(autouse=True)
def timed_once(monkeypatch):
    monkeypatch.setattr("gepc.lab.bench.baselines.REPEATS", 1)


@pytest.fixture(scope="module")
def place(tmp_path_factory, plain_net) -> Path:
    from diffusers import DDPMScheduler

    root = tmp_path_factory.mktemp("bench")
    plain_net.save_pretrained(root / "net")
    DDPMScheduler(beta_schedule="squaredcos_cap_v2").save_pretrained(root / "net")
    (root / "data").mkdir()
    for position, contrast in enumerate((0.3, 0.9)):
        parts = {
            f"{split}_x": as_uint8(pictures(30, 16, seed=3 * position + n, contrast=contrast))
            for n, split in enumerate(("train", "test"))
        }
        np.savez(root / "data" / f"set{position}.npz", **parts)
    (root / "protocol.yaml").write_text(
        "backbone: net\nsize: 16\ntrain_images: 30\ntest_images: 24\n"
        "datasets: {a: {dataset: 'npz:set0.npz', label: A}, b: {dataset: 'npz:set1.npz', label: B}}\n"
        "pairs: {a: [b], b: [a]}\nlevels: {default: [0.99, 0.9]}\n"
    )
    return root


def test_tables_and_figures_from_one_pass(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    assert run(["bench", "protocol.yaml", "--data", "data", "--out", "out", "--cache", "cache"]) == 0
    told = capsys.readouterr()
    assert "1,512 network passes" in told.err
    assert "1,512 passes made" in told.err
    results = json.loads((place / "out" / "results.json").read_text())
    assert {"main", "sweep", "false_alarms", "runtime"} <= {table["name"] for table in results["tables"]}
    for table in results["tables"]:
        assert (place / "out" / "tables" / f"{table['name']}.csv").exists()
        assert (place / "out" / "tables" / f"{table['name']}.tex").exists()
    figures = ["features", "transforms", "timesteps-a", "timesteps-b"]
    figures += [f"histogram-{quantity}" for quantity in ("energy", "residual", "definition")]
    assert {path.stem for path in (place / "out" / "figures").glob("*.png")} == set(figures)
    page = (place / "out" / "report.html").read_text()
    assert page.count("data:image/svg+xml") == len(figures)
    text = (place / "out" / "results.md").read_text()
    assert all(table["title"] in text for table in results["tables"])
    measured = next(row for row in results["tables"][0]["rows"] if row["method"] == "GEPC")
    assert f"{measured['A:B']:.3f}" in text

    monkeypatch.setattr("gepc.lab.bench.run.draw_all", lambda *_: {})  # they are drawn above
    assert run(["ablate", "protocol.yaml", "--data", "data", "--out", "ablations", "--cache", "cache"]) == 0
    assert "\n0 passes made" in "\n" + capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["bench", "protocol.yaml", "--data", "nowhere", "--out", "x"], "nowhere is not a folder"),
        (["bench", "protocol.yaml", "--out", "x"], "GEPC_DATA"),
        (["bench", "protocl", "--data", "data", "--out", "x"], "neither a YAML file nor a protocol"),
        (["bench", "protocol.yaml", "--data", "data", "--out", "x", "--set", "kep=1"], "did you mean 'keep'"),
        (["bench", "protocol.yaml", "--data", "data", "--out", "net"], "contains no benchmark"),
        (["ablate", "protocol.yaml", "--out", "x", "--backbone", "net", "--set", "backbone=n"], "either --backbone or"),
        (["ablate", "protocol.yaml", "--out", "x", "--cache", "x", "--no-cache"], "either --cache or --no-cache"),
        (["bench", "protocol.yaml", "--data", "net", "--out", "x"], "set0.npz does not exist"),
    ],
)
def test_bad_input_is_one_sentence(place, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(place)
    monkeypatch.delenv("GEPC_DATA", raising=False)
    assert run(arguments) == 2
    assert sentence in capsys.readouterr().err
    assert not (place / "x").exists()


def test_a_benchmark_that_ends_while_it_writes_is_completed(place, monkeypatch, capfd):
    """The old results or the new ones are there, file by file, and the same command completes; see `crashes`."""
    from gepc.lab.bench import run as benchmark

    monkeypatch.chdir(place)
    monkeypatch.setattr("gepc.lab.bench.run.draw_all", lambda *_: {})
    words = ["bench", "protocol.yaml", "--data", "data", "--out", "crashed", "--cache", "cache"]
    monkeypatch.setattr("gepc.lab.cli.evaluate.seconds_per_pass", lambda *_: 1e-3)
    results = []
    compute = benchmark.run
    monkeypatch.setattr(benchmark, "run", lambda *given, **more: results.append(compute(*given, **more)) or results[0])
    assert run(words) == 0
    expected = tree(Path("crashed"))
    monkeypatch.setattr(benchmark, "run", lambda *_, **__: results[0])  # the numbers are there; writing them is not
    count = changes(lambda: run(words))
    for number in (1, 2, 3, 5, 8, 12, count // 2, count):
        shutil.rmtree("crashed", ignore_errors=True)
        assert crash(lambda: run(words), number)
        found = tree(Path("crashed")) if Path("crashed").exists() else {}
        assert found.items() <= expected.items()
        assert run(words) == 0
        assert tree(Path("crashed")) == expected
