"""Every script of the gallery runs at a small size and finds what it says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image
from toys import toy_backbone

import gepc
from gepc.lab.report.beach import beach

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script by name, with the variable that makes it small."""
    monkeypatch.setenv("GEPC_EXAMPLE_SIZE", "small")

    def script(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return script


def test_no_example_is_forgotten() -> None:
    assert not [path.stem for path in EXAMPLES.glob("*.py") if f"test_{path.stem}" not in globals()]


def test_minimal_gepc(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    auroc = load("minimal_gepc").main(3)
    assert f"AUROC gravel against grass {auroc:.3f}" in capsys.readouterr().out


def test_cross_domain(load: Any) -> None:
    """Grass and gravel are nothing like a brick wall, even for two patches of each."""
    found = load("cross_domain").main()
    assert set(found) == {"grass", "gravel", "moon", "page"}
    assert min(found["grass"], found["gravel"]) > 0.5


def test_radar_ships(load: Any) -> None:
    """A ship is told from empty sea."""
    assert load("radar_ships").main()["auroc"] > 0.5


def test_radar_pipeline(load: Any, tmp_path: Path) -> None:
    """Simulate, cut, fit, compare and scan: no step is a dead end."""
    found = load("radar_pipeline").main(tmp_path)
    assert min(found["gepc+:radar"], found["ca_cfar"]) > 0.6
    assert found["alarms"] > 0


def test_custom_symmetry(load: Any) -> None:
    """A half turn is blind to itself, exactly; shifts are not."""
    found = load("custom_symmetry").main()
    assert found["gap"] < 1e-12
    assert found["shifts by 2"] > found["half turn only"]


def test_compare_detectors(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = load("compare_detectors").main()
    assert list(found) == [name for name in gepc.list_detectors() if name not in ("cfs", "energy", "encoder")]
    assert all(0.0 <= value <= 1.0 for value in found.values())
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(found)
    assert all(re.search(r" \d+F\+\d+J$", line) for line in lines)


def test_theory_bounds(load: Any) -> None:
    """Drawing stops if a residual leaves its bounds, which is shown with bounds that are wrong."""
    script = load("theory_bounds")
    script.draw(script.PANELS, thin=6)

    def wrong(value: float) -> Any:
        bounds = script.mean_shift(1.0 + value)
        return script.ResidualBounds(**{**vars(bounds), "residual": 2 * bounds.upper})

    with pytest.raises(SystemExit, match="leaves its bounds"):
        script.draw([("wrong", "x", wrong, script.np.array([0.0, 1.0])), *script.PANELS[1:]], thin=6)


def test_the_ten_lines_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They run as they are on folders of photographs, with 57 normal ones; a small network takes the place of ours."""
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"## Ten lines .*?```python\n(.*?)```", readme, re.DOTALL)
    assert 'load_backbone("photos-small")' in lines
    for folder, count in {"normal": 57, "new": 3}.items():
        (tmp_path / "photos" / folder).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(beach(number, 30, 40)).save(tmp_path / "photos" / folder / f"IMG_{number}.jpg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gepc, "load_backbone", lambda _: toy_backbone(image_size=None))
    exec(compile(lines, "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in printed] == [str(Path("photos/new") / f"IMG_{n}.jpg") for n in range(3)]
    assert (tmp_path / "det" / "detector.json").exists()
