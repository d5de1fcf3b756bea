"""Which detector to take, from normal images alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys import as_uint8, pictures, toy_network

from gepc.backbones.base import Backbone
from gepc.calibration.scorer import Selection
from gepc.cli.app import run
from gepc.core.errors import InputError
from gepc.detector.stream import score_chunk
from gepc.images.batches import Chunk
from gepc.images.synthetic import KINDS
from gepc.lab.bench import choose
from gepc.lab.bench.choose import (
    CANDIDATES,
    DEFAULT,
    Candidate,
    Trial,
    candidates_for,
    clear_leader,
    compare,
    recommend,
)
from gepc.lab.bench.evaluate import Scores
from gepc.methods.base import Cost

IMAGES = as_uint8(pictures(60))
FEW = (DEFAULT, Candidate("gepc+:single"), Candidate("pixel_stats"))


@pytest.fixture(scope="module")
def trials() -> list[Trial]:
    return compare(toy_network(), IMAGES, FEW)


def test_the_best_candidate_comes_first(trials: list[Trial]) -> None:
    averages = [trial.average for trial in trials]
    assert averages == sorted(averages, reverse=True)
    for trial in trials:
        assert set(trial.aurocs) == set(KINDS)
        assert trial.average == pytest.approx(np.mean(list(trial.aurocs.values())))
        assert -1.0 <= trial.stability <= 1.0
    costs = {str(trial.candidate): trial.cost.forward for trial in trials}
    assert costs == {"gepc+:fast": 2, "gepc+:single": 1, "pixel_stats": 0}
    assert {str(trial.candidate): trial.stability for trial in trials}["pixel_stats"] == 1.0  # it uses no noise


def test_half_of_the_images_are_fitted_on_and_none_of_them_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[Any]] = {}

    class Noting(Candidate):
        def detector(self, backbone: Any, **common: Any) -> Any:
            detector = super().detector(backbone, **common)
            fit = detector.fit

            def noted_fit(images: Any) -> Any:
                seen["fitted"] = [record.name for record in images]
                return fit(images)

            detector.fit = noted_fit  # type: ignore[method-assign]
            return detector

    def noted_score(fitted: Any, chunk: Chunk, **options: Any) -> Any:
        seen.setdefault("scored", []).append(len(chunk))
        return score_chunk(fitted, chunk, **options)

    monkeypatch.setattr(choose, "score_chunk", noted_score)
    (trial,) = compare(toy_network(), IMAGES, [Noting("pixel_stats")], count=50)
    assert len(set(seen["fitted"])) == 25
    assert sum(seen["scored"]) == 25 * (2 + len(KINDS))  # two noise seeds
    assert len(trial.scores.inside) == 25


def test_too_few_images_are_refused() -> None:
    with pytest.raises(InputError, match="at least 40 images; there are 39"):
        compare(toy_network(), IMAGES[:39])


def made(method: str, shift: float, spread: float = 1.0) -> Trial:
    """A trial whose outliers score higher by `shift`."""
    rng = np.random.default_rng(0)
    inside = rng.normal(0.0, spread, 200)
    outside = {kind: rng.normal(shift, spread, 200) for kind in KINDS}
    return Trial(Candidate(method), Cost(2), Scores(inside, outside, (), Selection((), np.ones(0), np.ones(0))), 1.0)


def test_the_default_is_recommended_and_a_clear_leader_is_named() -> None:
    default, worse, close, better = (
        made("gepc+:fast", 1.0),
        made("cfs", 0.5),
        made("gepc", 1.01),
        made("msma:knn", 2.0),
    )
    assert recommend([default, worse]) == (default, "take the default: it has the highest average")
    assert clear_leader([default, worse]) is None
    chosen, reason = recommend([close, default])
    assert chosen is default
    assert reason == "take the default: no candidate is clearly better (gepc is first)"
    assert clear_leader([close, default]) is None
    chosen, reason = recommend([better, default, worse])
    assert chosen is default
    assert reason.startswith("take the default: msma:knn leads by 0.1")
    assert reason.endswith(f"outliers like these kinds: {', '.join(KINDS)}")
    leader = clear_leader([better, default, worse])
    assert leader is not None
    assert leader[0] is better
    assert leader[1] == pytest.approx(better.average - default.average)
    assert recommend([better, worse])[0] is better
    assert "default was not among" in recommend([better, worse])[1]
    assert clear_leader([better, worse]) is None


def test_every_candidate_can_be_made_and_asked_for() -> None:
    network = toy_network()
    for candidate in CANDIDATES:
        detector = candidate.detector(network)
        for name, value in candidate.options.items():
            assert detector.options()[name] == ["id", value]
    assert Candidate("gepc+:fast", {"group": "flip_x"}).arguments == "--method gepc+ --preset fast --set group=flip_x"
    assert Candidate("cfs").arguments == "--method cfs"
    assert DEFAULT in CANDIDATES


def test_other_sizes_are_candidates_where_the_network_takes_any_size_and_nothing_is_enlarged() -> None:
    def sides(side: int, size: int | None = None, image_size: int | None = None) -> list[int]:
        network = Backbone.from_callable(lambda x, t: x, [0.9], channels=1, image_size=image_size, size_multiple=8)
        found = candidates_for(np.zeros((2, side, side + 9), np.uint8), network, size)
        assert tuple(found[: len(CANDIDATES)]) == CANDIDATES
        assert all(candidate.method == DEFAULT.method for candidate in found[len(CANDIDATES) :])
        return [candidate.options["size"] for candidate in found[len(CANDIDATES) :]]

    assert sides(63) == []
    assert sides(64) == [32]
    assert sides(100) == [48]  # a multiple of 8
    assert sides(100, size=32) == [64]
    assert sides(100, size=64) == [32]
    assert sides(200, size=100) == [48, 200]
    assert sides(200, image_size=32) == []
    assert Candidate("gepc+:fast", {"size": 48}).arguments == "--method gepc+ --preset fast --set size=48"


def test_the_command_prints_a_table_and_the_next_command(
    tmp_path: Path, tiny_net: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from diffusers import DDPMScheduler

    monkeypatch.chdir(tmp_path)
    tiny_net.save_pretrained("net")
    DDPMScheduler(beta_schedule="squaredcos_cap_v2").save_pretrained("net")
    np.save("normal.npy", as_uint8(pictures(44, 16)))
    monkeypatch.setattr("gepc.lab.bench.choose.CANDIDATES", FEW)
    assert run(["choose", "normal.npy", "--backbone", "net"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].split()[:2] == ["candidate", "average"]
    assert told[-1].startswith("gepc fit normal.npy --out DETECTOR --backbone net --method ")
    assert run([*told[-1].replace("DETECTOR", "det").split()[1:]]) == 0
    capsys.readouterr()
    assert run(["choose", "normal.npy", "--backbone", "net", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["command"] == told[-1]
    assert [row["candidate"] for row in found["trials"]] == [line.split("  ")[0] for line in told[1:4]]
