"""gepc bench --methods through the command line, on a tiny network and made-up data sets."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from toys import as_uint8, pictures

from gepc.backbones.openai.convert import Architecture, expected_shapes
from gepc.cli.app import run
from gepc.core.errors import InputError


@pytest.fixture(autouse=True)
def timed_once(monkeypatch):
    monkeypatch.setattr("gepc.lab.bench.baselines.REPEATS", 1)


@pytest.fixture(scope="module")
def place(tmp_path_factory, plain_net) -> Path:
    from diffusers import DDPMScheduler

    root = tmp_path_factory.mktemp("baselines")
    plain_net.save_pretrained(root / "net")
    DDPMScheduler(beta_schedule="squaredcos_cap_v2").save_pretrained(root / "net")
    for position, contrast in enumerate((0.3, 0.9)):
        parts = {
            f"{split}_x": as_uint8(pictures(24, 16, seed=3 * position + n, contrast=contrast))
            for n, split in enumerate(("train", "test"))
        }
        np.savez(root / f"set{position}.npz", **parts)
    (root / "protocol.yaml").write_text(
        "backbone: net\nsize: 16\ntrain_images: 24\ntest_images: 22\n"
        "datasets: {a: {dataset: 'npz:set0.npz', label: A}, b: {dataset: 'npz:set1.npz', label: B}}\n"
        "pairs: {a: [b]}\nlevels: {default: [0.99, 0.9]}\n"
        "methods: {msma: {options: {levels: 'rho:0.1,1'}}, scoped: {train_images: 20, test_images: 20}}\n"
    )
    return root


@pytest.fixture
def bench(place, monkeypatch):
    monkeypatch.chdir(place)
    arguments = ["bench", "protocol.yaml", "--data", ".", "--out", "out", "--cache", "cache"]
    return lambda *more: run([*arguments, *more])


def test_a_comparison_with_its_tables_and_its_figure(place, bench, capsys, monkeypatch):
    monkeypatch.setattr("gepc.lab.bench.run.three_histograms", lambda *_: {})  # test_bench_cli.py draws all figures
    assert bench("--methods", "msma,scoped") == 0
    told = capsys.readouterr()
    assert "msma" in told.err
    lines = [line.split()[:4] for line in told.err.splitlines()]
    assert ["msma", "68", "2F+0J", "136"] in lines  # 2 levels, 24 + 22 + 22 images
    assert ["scoped", "60", "1F+1J", "120"] in lines  # 20 + 20 + 20 images
    made = 7 * 2 * 68 + 136 + 120
    assert f"{made:,} passes made" in told.err
    assert "| scoped | measured | light |" in told.out

    results = json.loads((place / "out" / "results.json").read_text())
    main = results["tables"][0]
    assert main["name"] == "main"
    assert [row["method"] for row in main["rows"] if row["source"] == "measured"] == ["GEPC", "msma", "scoped"]
    for name in ("main", "methods"):
        assert (place / "out" / "tables" / f"{name}.csv").is_file()
        assert (place / "out" / "tables" / f"{name}.tex").is_file()
    assert (place / "out" / "figures" / "features.png").is_file()
    assert "presets that were not named: msma:light, scoped:light" in told.err  # in the protocol they have none either


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--methods", "mmsa"], "did you mean 'msma'"),
        (["--methods", ""], "all, training-free, or names"),
        (["--methods", "lmd", "--set", "methods={lmd: {preset: lite}}"], "did you mean 'light'"),
        (["--methods", "lmd", "--set", "methods={lmd: {options: {steps: abc}}}"], "lmd: steps must be int, got 'abc'"),
        (["--methods", "msma", "--set", "methods={msma: {options: {noised: maybe}}}"], "noised must be bool"),
    ],
)
def test_bad_input_is_one_sentence(place, bench, capsys, arguments, sentence):
    assert bench("--out", "x", *arguments) == 2
    assert sentence in capsys.readouterr().err
    assert not (place / "x").exists()


def test_a_file_in_the_place_of_the_folder(place, bench, capsys):
    (place / "file").write_text("mine")
    assert bench("--out", "file") == 2
    assert "file is a file; give a folder for the results" in capsys.readouterr().err
    assert (place / "file").read_text() == "mine"


def test_reproduce_is_the_benchmark_with_everything(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setattr("gepc.lab.bench.run.draw_all", lambda *_: {})
    arguments = ["reproduce", "protocol.yaml", "--data", ".", "--out", "again", "--cache", "cache", "--methods", "msma"]
    arguments += ["--energy-minutes", "0"]
    assert run(arguments) == 0
    assert (place / "again" / "results.md").is_file()
    first = (place / "again" / "tables" / "methods.csv").read_text()
    capsys.readouterr()
    assert run(arguments) == 0
    assert capsys.readouterr().err.count("\n0 passes made") == 2
    assert (place / "again" / "tables" / "methods.csv").read_text() == first


def test_reproduce_runs_both_readings_of_the_paper(place, monkeypatch, capsys):
    """The second one asks the network for another time and takes the first images."""
    monkeypatch.chdir(place)
    monkeypatch.setattr("gepc.lab.bench.run.draw_all", lambda *_: {})
    common = ["protocol.yaml", "--data", ".", "--cache", "cache"]
    assert run(["reproduce", *common, "--out", "both", "--methods", "pixel_stats", "--energy-minutes", "0"]) == 0
    (table,) = json.loads((place / "both" / "readings.json").read_text())["tables"]
    rows = {row["reading"]: row["A:B"] for row in table["rows"]}
    assert list(rows) == ["paper", "released"]
    about = json.loads((place / "both" / "released" / "results.json").read_text())["about"]
    assert (about["protocol"]["time_scale"], about["protocol"]["subset_seed"]) == (4.0, None)
    for reading in rows:
        assert run(["bench", *common, "--out", reading, "--reading", reading]) == 0
        main = json.loads((place / reading / "results.json").read_text())["tables"][0]["rows"][0]
        assert main["A:B"] == rows[reading]
    assert run(["bench", *common, "--out", "never", "--reading", "releasd"]) == 2
    assert "did you mean 'released'" in capsys.readouterr().err


def test_a_checkpoint_of_the_shape_of_the_papers_network_is_taken_as_it_is(place, monkeypatch, capsys):
    """With empty weights; what the run would take is printed without data."""
    monkeypatch.chdir(place)
    monkeypatch.setattr("gepc.lab.cli.evaluate.seconds_per_pass", lambda *_: 0.01)
    net = Architecture(3, 6, 128, (128, 256, 256, 256), 3, (False, True, True, False), True, "conv", None)
    shapes = expected_shapes(net)
    torch.save({name: torch.zeros(shape, dtype=torch.float16) for name, shape in shapes.items()}, "celeba_ema.pt")
    command = ["reproduce", "paper32", "--data", "none", "--out", "never", "--methods", "msma", "--dry-run"]
    assert run([*command, "--backbone", "celeba_ema.pt", "--architecture", "diffpath-celeba32"]) == 0
    told = capsys.readouterr()
    lines = [line.split() for line in told.out.splitlines()]
    assert [line[3:6] for line in lines if line[0] == "GEPC,"] == [
        ["48,000", "7F+0J", "336,000"],
        ["64,000", "7F+0J", "448,000"],
    ]
    assert told.out.count("GB of memory") == 2
    assert "9 energy networks, 60 minutes of training each" in told.err


def test_energy_models_are_trained_on_each_id_set(place, monkeypatch, capsys):
    from gepc.lab.bench import energy
    from gepc.lab.bench.protocol import load_protocol

    monkeypatch.chdir(place)
    monkeypatch.setattr(energy, "ROWS", {"igebm": "IGEBM"})
    networks: list[int] = []
    table = energy.energy_table(load_protocol("protocol.yaml"), Path(), Path("energy"), 0.01, networks.append)
    (row,) = table.rows
    assert row[:2] == ("IGEBM", "measured")
    assert 0.0 <= row[2] <= 1.0
    assert networks == [1]
    assert (place / "energy" / "igebm-a").is_dir()
    (place / "other").mkdir()
    np.savez(place / "other" / "set0.npz", train_x=as_uint8(pictures(24, 16, seed=9)))
    with pytest.raises(InputError, match="holds a run on other images"):
        energy.energy_table(load_protocol("protocol.yaml"), Path("other"), Path("energy"), 0.01)


def test_a_dry_run_needs_no_data(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    dry = ["--data", "none", "--out", "never", "--dry-run", "--methods", "msma,scoped", "--backbone", "net"]
    assert run(["reproduce", "paper32", *dry, "--set", "size=16"]) == 0
    told = capsys.readouterr().out
    lines = [line.split() for line in told.splitlines()]
    assert ["GEPC,", "each", "level", "48,000", "7F+0J", "336,000"] in [line[:6] for line in lines]
    assert ["scoped", "paper", "10,000", "2F+2J", "40,000"] in [line[:5] for line in lines]
    assert "GB of memory" in told
    assert "to download: 0.6 GB" in told  # CIFAR-10, CIFAR-100 and SVHN; CelebA has no address
    assert not (place / "none").exists()
    assert not (place / "never").exists()
    assert run(["reproduce", "paper32", *dry, "--set", "size=16", "--light"]) == 0
    printed = capsys.readouterr()
    assert ["scoped", "10,000", "1F+1J"] in [line.split()[:3] for line in printed.out.splitlines()]
    assert "9 energy networks, 6 minutes" in printed.err
    assert run(["reproduce", "paper32", *dry, "--set", "size=16", "--light", "--energy-minutes", "30"]) == 0
    assert "9 energy networks, 30 minutes" in capsys.readouterr().err
    assert run(["bench", "protocol.yaml", "--dry-run", "--out", "never", "--methods", "scoped"]) == 0
    assert ["scoped", "60", "1F+1J"] in [line.split()[:3] for line in capsys.readouterr().out.splitlines()]


OPENAI = {
    "image_size": 16,
    "num_heads": 4,
    "noise_schedule": "cosine",
    "diffusion_steps": 40,
    "rescale_timesteps": True,
}


@pytest.fixture(scope="module")
def checkpoint(place) -> str:
    """A checkpoint of OpenAI's layout with random tensors."""
    net = Architecture(3, 6, 32, (32, 64), 1, (False, True), True, "conv", None)
    random = torch.Generator().manual_seed(0)
    tensors = {name: 0.02 * torch.randn(shape, generator=random) for name, shape in expected_shapes(net).items()}
    torch.save(tensors, place / "ema.pt")
    (place / "ema.yaml").write_text(yaml.safe_dump(OPENAI))
    return "ema.pt"


def test_an_openai_checkpoint_is_evaluated_in_one_command(place, checkpoint, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setattr("gepc.lab.bench.run.draw_all", lambda *_: {})
    command = ["bench", "protocol.yaml", "--data", ".", "--cache", "cache", "--backbone", checkpoint]
    command += ["--methods", "score_norm", "--set", "group=flips", "--set", "batch_size=4"]
    command += ["--set", "train_images=20", "--set", "test_images=20"]
    assert run([*command, "--out", "by-file", "--config", "ema.yaml"]) == 0
    settings = [word for name, value in OPENAI.items() for word in ("--set", f"{name}={value}")]
    assert run([*command, "--out", "by-set", *settings, "--set", "seeds=[0]"]) == 0
    assert "0 passes made" in capsys.readouterr().err  # the same network
    rows = [(place / out / "tables" / "methods.csv").read_text() for out in ("by-file", "by-set")]
    assert rows[0] == rows[1]
    assert run([*command, "--out", "none", "--dry-run", "--config", "ema.yaml"]) == 0
    assert "score_norm" in capsys.readouterr().out


def test_what_a_checkpoint_does_not_show_must_be_said(place, checkpoint, monkeypatch, capsys):
    monkeypatch.chdir(place)
    command = ["reproduce", "protocol.yaml", "--data", ".", "--out", "never", "--backbone", checkpoint]
    assert run(command) == 2
    assert "noise_schedule" in capsys.readouterr().err
    assert run([*command, "--architecture", "diffpath-celeba32"]) == 2
    assert "num_channels" in capsys.readouterr().err  # the checkpoint is smaller
    assert run([*command, "--architecture", "diffpath-celeba32", "--config", "ema.yaml"]) == 2
    assert "either --architecture or --config" in capsys.readouterr().err


def test_features_are_kept_in_the_cache_of_the_user(place, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("gepc.lab.bench.run.draw_all", lambda *_: {})
    assert run(["ablate", "protocol.yaml", "--data", ".", "--out", "ablated"]) == 0
    assert f"from the cache in {tmp_path / 'gepc' / 'features'}\n" in capsys.readouterr().err
    assert any((tmp_path / "gepc" / "features").rglob("*.safetensors"))
    assert not list(place.glob(".gepc*"))


def test_missing_data_are_fetched_first(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    asked = []

    def fetch(name, folder, mirror, advance):
        asked.append((name, folder, mirror))
        raise InputError("no network here")

    monkeypatch.setattr("gepc.lab.datasets.download.fetch", fetch)
    assert run(["reproduce", "--data", "new", "--out", "never", "--mirror", "http://here", "--light"]) == 2
    assert "no network here" in capsys.readouterr().err
    assert asked == [("celeba", Path("new"), "http://here")]  # what has to be downloaded by hand comes first
