"""The demonstration takes the patches it says it takes, and reports what the detector says."""

from __future__ import annotations

import json
import socket
from dataclasses import replace

import numpy as np
import pytest
from pages import ReadPage, outside_references
from toys import toy_backbone

from gepc.lab.report import demo
from gepc.lab.report.demo import FULL, INSIDE, OUTSIDE, QUICK, SIDE, Amounts

SMALL = Amounts(fit=12, calibration=19, held_out=7, other=2)


@pytest.fixture(scope="module")
def finished() -> tuple[demo.Demo, list[int], int]:
    """A small run on a toy network: the result, the passes told along the way, the passes estimated."""
    detector = demo.build_detector(toy_backbone(image_size=None))
    data = demo.load_data(SMALL)
    told: list[int] = []
    estimated = demo.passes_needed(detector, data)
    return demo.run(detector, data, told.append), told, estimated


@pytest.mark.parametrize("photograph", [INSIDE, *OUTSIDE], ids=lambda photograph: photograph.name)
def test_photographs_need_no_download(photograph, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a download was tried")

    monkeypatch.setattr(socket, "socket", refuse)
    pixels = demo.load_photograph(photograph)
    assert pixels.dtype == np.uint8
    assert pixels.ndim == 3


@pytest.mark.parametrize("amounts", [FULL, QUICK, SMALL], ids=["full", "quick", "small"])
def test_there_are_as_many_patches_as_asked_for(amounts):
    data = demo.load_data(amounts)
    assert (len(data.fit), len(data.calibration), len(data.held_out)) == (
        amounts.fit,
        amounts.calibration,
        amounts.held_out,
    )
    assert [len(other) for other in data.others] == [amounts.other] * len(OUTSIDE)


def test_patches_of_a_photograph_never_share_a_pixel():
    data = demo.load_data()
    for sets in ([data.fit, data.calibration, data.held_out], *([other] for other in data.others)):
        used = np.zeros(demo.load_photograph(sets[0].photograph).shape[:2], dtype=int)
        for patches in sets:
            for top, left in patches.corners:
                used[top : top + SIDE, left : left + SIDE] += 1
        assert used.max() == 1


def test_what_is_fitted_on_lies_a_patch_apart_from_what_is_scored():
    data = demo.load_data()
    lowest = data.fit.corners[:, 0].max() + SIDE
    highest = min(patches.corners[:, 0].min() for patches in (data.calibration, data.held_out))
    assert highest - lowest >= SIDE


def test_calibration_and_held_out_patches_are_mixed():
    data = demo.load_data()
    rows = [set(patches.corners[:, 0]) for patches in (data.calibration, data.held_out)]
    assert rows[0] == rows[1]


def test_patches_are_cut_where_they_say_and_the_same_every_time():
    first, second = demo.load_data(QUICK), demo.load_data(QUICK)
    for one, two in zip(first.scored, second.scored, strict=True):
        assert np.array_equal(one.pixels, two.pixels)
        top, left = one.corners[3]
        pixels = demo.load_photograph(one.photograph)
        assert np.array_equal(one.pixels[3], pixels[top : top + SIDE, left : left + SIDE])


def test_passes_are_estimated_reported_and_counted_alike(finished):
    result, told, estimated = finished
    assert result.passes == sum(told) == estimated


def test_alarms_are_the_scores_above_the_threshold(finished):
    result = finished[0]
    for scored in result.scored:
        assert np.array_equal(scored.scores > result.threshold, scored.p_values <= result.alpha)
        assert scored.alarms == (scored.scores > result.threshold).sum()
        assert scored.alarms == result.detector.predict(scored.pixels, alpha=result.alpha).sum()


def test_scores_and_maps_are_the_detectors(finished):
    result = finished[0]
    for scored in result.scored:
        assert np.allclose(scored.scores, result.detector.score(scored.pixels))
        shown = scored.scores[list(scored.shown)]
        assert shown.min() == scored.scores.min()
        assert shown.max() == scored.scores.max()
        assert np.allclose(scored.maps, result.detector.score_map(scored.pixels[list(scored.shown)]))


def test_results_are_plain_values(finished):
    result = finished[0]
    again = json.loads(json.dumps(result.as_dict()))
    assert [pair["name"] for pair in again["pairs"]] == [photograph.name for photograph in OUTSIDE]
    assert again["scores"]["gravel"]["score"] == result.held_out.scores.tolist()


@pytest.mark.parametrize(("n", "m"), [(19, 24), (59, 53), (200, 10)])
def test_false_alarms_of_exchangeable_scores_fall_in_the_expected_range(n, m):
    rng = np.random.default_rng(n)
    low, high = demo.expected_alarms(0.05, n, m)
    scores = rng.random((4000, n + m))
    limit = np.sort(scores[:, :n], axis=1)[:, n - int(0.05 * (n + 1))]
    alarms = (scores[:, n:] > limit[:, None]).sum(axis=1)
    inside = ((alarms >= low) & (alarms <= high)).mean()
    assert inside >= 0.9 - 3 * np.sqrt(0.9 * 0.1 / 4000)


@pytest.mark.parametrize(("alarms", "expected"), [(0, True), (4, True), (5, False)])
def test_a_count_outside_the_range_is_called_so(alarms, expected):
    check = demo.AlarmCheck(0.05, alarms, 20, 0, 4)
    assert check.as_expected is expected
    assert check.rate == alarms / 20


def test_the_report_holds_the_results_and_the_limits(finished):
    result = finished[0]
    page = ReadPage(demo.render_demo(result, "gepc demo --out demo"))
    text = " ".join(page.text)
    assert outside_references(page) == []
    assert page.unclosed == []
    for row in demo.result_rows(result):
        for cell in row:
            assert cell in text
    guarantee = result.detector.guarantee(result.alpha)
    for wanted in (
        f"{guarantee.low:.3f} and {guarantee.high:.3f}",
        f"{result.passes:,} counted",
        "gepc demo --out demo",
        "Nothing was tuned.",
        "A quick run.",
        "torch ",
    ):
        assert wanted in text
    assert "trained on faces" not in text


@pytest.fixture
def no_figures(monkeypatch):
    """Pages without their figures, which a test above draws."""
    monkeypatch.setattr("gepc.lab.report.page.inline_svg", lambda *_: "")


def test_the_report_says_that_the_embedded_network_knows_faces(finished, no_figures):
    result = finished[0]
    result.detector.backbone.source = "celeba32-tiny"
    try:
        assert "trained on faces" in demo.render_demo(result, "")
    finally:
        result.detector.backbone.source = None


def test_an_auroc_of_one_is_not_certain(finished):
    scored = finished[0].held_out
    result = replace(finished[0], scored=(scored, replace(scored, scores=scored.scores + 1e6)))
    low = 0.025 ** (1 / len(scored.scores))
    assert demo.result_rows(result)[0][2:4] == ("1.000", f"{low:.3f} to 1.000")


def test_the_report_says_whether_the_alarms_are_as_expected(finished, no_figures):
    result = finished[0]
    for alarms, words in ((0, "is in this range"), (len(result.held_out), "which happens by chance")):
        changed = replace(result, scored=(replace(result.held_out, alarms=alarms), *result.others))
        assert changed.false_alarms.as_expected == (alarms == 0)
        assert words in " ".join(demo.render_demo(changed, "").split())


@pytest.mark.parametrize(
    ("score", "text"), [(-5.23, "−5.2"), (99.94, "99.9"), (99.96, "100"), (2476.3, "2476"), (-300.2, "−300")]
)
def test_scores_are_short(score, text):
    assert demo.short(score) == text
