"""Free-response curves of radar scenes: what is a detection, a hit and a false alarm, and the script as a whole."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
import radar_scenes
from radar_scenes import detection_rates, match, peaks, resampled

from gepc.lab.radar.annotations import Box

sys.path.insert(0, str(Path(__file__).parents[1] / "lab" / "radar"))
from radar_files import write_hrsid


def test_a_peak_is_the_largest_value_within_the_radius_and_a_plateau_is_one_peak() -> None:
    field = np.linspace(0.0, -1.0, 400).reshape(20, 20)  # falls from the upper left corner, without a further peak
    field[10, 10], field[10, 13], field[17, 2:4] = 5.0, 4.0, 3.0
    field[0, 18:] = np.nan
    values, places = peaks(field, 3)
    assert sorted(values.tolist()) == [0.0, 3.0, 5.0]
    assert [10, 10] in places.tolist()
    assert sorted(peaks(field, 2)[0].tolist()) == [0.0, 3.0, 4.0, 5.0]


def test_hits_count_once_per_ship_and_everything_outside_the_grown_boxes_is_a_false_alarm() -> None:
    ships = [Box(10, 10, 10, 10), Box(24, 10, 10, 10), Box(60, 60, 5, 5)]
    places = np.array([[15, 15], [12, 18], [15, 22], [15, 40], [50, 50]])  # the third is between two ships
    values = np.array([3.0, 5.0, 9.0, 7.0, 1.0])
    found, false = match(values, places, ships, margin=4)
    assert found.tolist() == [5.0, 9.0, -np.inf]  # nearer to the centre of the second ship
    assert false.tolist() == [7.0, 1.0]
    assert match(values, places, ships, margin=0)[1].tolist() == [9.0, 7.0, 1.0]


def test_the_detection_rate_allows_no_more_false_alarms_than_asked_for() -> None:
    ships, false = np.array([9.0, 6.0, 4.0, -np.inf]), np.array([8.0, 5.0, 3.0])
    assert detection_rates(ships, false, 2.0, (0.1, 0.5, 1.0, 1.5, 10.0)).tolist() == [0.25, 0.5, 0.75, 0.75, 0.75]
    assert detection_rates(np.array([8.0]), false, 2.0, (0.1,)) == 0.0  # a tie with a false alarm is no detection


def test_intervals_resample_panoramas_rather_than_scenes() -> None:
    nothing = np.array([])

    def scene(source: str, value: float) -> radar_scenes.Findings:
        return radar_scenes.Findings(source, 1, np.array([value]), nothing, nothing, nothing)

    def mean(findings: list[radar_scenes.Findings]) -> list[float]:
        return [float(np.mean([one.ships[0] for one in findings]))]

    one, low, high = resampled([scene("a", 0.0), scene("a", 1.0), scene("a", 0.5)], mean)
    assert one == low == high == 0.5
    _, low, high = resampled([scene("a", 0.0), scene("b", 1.0)], mean)
    assert (low, high) == (0.0, 1.0)


def test_the_script_finds_bright_ships_and_resumes(
    tmp_path: Path, plain_net: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from diffusers import DDPMScheduler

    def written() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/ca_cfar/*/map.npy")}

    plain_net.save_pretrained(tmp_path / "net")  # type: ignore[attr-defined]
    DDPMScheduler(beta_schedule="squaredcos_cap_v2").save_pretrained(tmp_path / "net")
    train = {f"P{k:04d}_0_64_0_64.jpg": [] for k in range(8)}
    test = {f"P{k:04d}_0_64_0_64.jpg": [(22.0, 20.0, 5.0, 5.0)] for k in range(10, 13)}
    write_hrsid(tmp_path / "HRSID", {"train": train, "test": test})
    arguments = [
        str(tmp_path / "HRSID"),
        "--out",
        str(tmp_path / "out"),
        "--methods",
        "ca_cfar,gepc+:radar",
        "--size",
        "16",
    ]
    arguments += ["--backbone", str(tmp_path / "net"), "--target-pixels", "16", "--hold-out", "0.6", "--alpha", "0.1"]
    monkeypatch.setattr(radar_scenes, "DRAWS", 20)
    monkeypatch.setattr(sys, "argv", ["radar_scenes.py", *arguments, "--scenes", "2"])
    radar_scenes.main()
    assert "2 scenes of 2 panoramas, 2 ships, 0.0 megapixels" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["radar_scenes.py", *arguments])
    finished = written()
    assert len(finished) == 2
    radar_scenes.main()
    assert finished.items() < written().items()  # the third scene alone is scanned
    assert "| ca_cfar | 1 (1.000 to 1.000) |" in (tmp_path / "out" / "scenes.md").read_text()
    with open(tmp_path / "out" / "froc.csv") as handle:
        found = [float(row["ships_found"]) for row in csv.DictReader(handle)]
    assert found[: len(radar_scenes.GRID)] == [1.0] * len(radar_scenes.GRID)  # of ca_cfar
    assert found[len(radar_scenes.GRID) :] == sorted(found[len(radar_scenes.GRID) :])
    assert (tmp_path / "out" / "froc.png").is_file()
