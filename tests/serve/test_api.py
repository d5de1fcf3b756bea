"""Every endpoint: the answers agree with the library, and errors have a message."""

import base64
import io
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from serving import as_form

pytestmark = pytest.mark.usefixtures("trusted")


def test_scores_p_values_and_verdicts_are_the_library_s(client, detector, images, files):
    answer = client.post("/v1/score", files=as_form(files), data={"alpha": "0.1"})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    results = body["results"]
    assert [result["index"] for result in results] == list(range(12))
    assert np.allclose([result["score"] for result in results], detector.score(images), rtol=0, atol=1e-5)
    assert [result["p_value"] for result in results] == detector.p_value(images).tolist()
    assert [result["alarm"] for result in results] == detector.predict(images, 0.1).tolist()
    assert body["alpha"] == 0.1
    assert body["guarantee"] == str(detector.guarantee(0.1))
    assert all(result["map"] is None and result["seen"] is None for result in results)


def test_form_fields_and_query_say_the_same_and_form_fields_win(client, files):
    by_query = client.post("/v1/score?alpha=0.2&map=true", files=as_form(files[:2])).json()
    by_form = client.post("/v1/score", files=as_form(files[:2]), data={"alpha": "0.2", "map": "true"}).json()
    overruled = client.post("/v1/score?alpha=0.3&map=true", files=as_form(files[:2]), data={"alpha": "0.2"}).json()
    assert by_query == by_form == overruled
    assert by_query["alpha"] == 0.2
    assert by_query["results"][0]["map"] is not None
    without = client.post("/v1/score?map=true", files=as_form(files[:2]), data={"map": "false"}).json()
    assert without["results"][0]["map"] is None


def test_the_default_alpha_is_0_05_or_the_smallest_possible(client, files):
    assert client.post("/v1/score", files=as_form(files[:1])).json()["alpha"] == 0.05
    answer = client.get("/v1/detector").json()
    assert answer["guarantee"]["alpha"] == 0.05
    assert answer["smallest_alpha"] == 1 / 21


def test_the_limits_of_all_rates_are_those_of_the_decision_rule(serve, detector_folder, files):
    """A page may decide for any rate by comparing p-values with the limits that come with the detector."""
    for name, group in (("det", {}), ("grouped", {"group": "night"})):
        client = serve(detector_folder.with_name(name))
        body = client.get("/v1/detector", params={"rates": True}).json()
        rates = body["rates"]
        assert set(rates[0]) == {"alpha", "limit", "low", "high"}
        alphas = [rate["alpha"] for rate in rates]
        assert alphas == sorted(set(alphas))
        assert (alphas[0], alphas[-1]) == (body["smallest_alpha"], 0.5)
        assert body["guarantee"]["alpha"] in alphas
        assert {key: body["guarantee"][key] for key in rates[0]} in rates
        for rate in (rates[0], rates[len(rates) // 2], rates[-1]):
            answer = client.post("/v1/score", files=as_form(files), data={"alpha": rate["alpha"], **group}).json()
            for result in answer["results"]:
                assert result["alarm"] == (result["p_value"] <= rate["limit"])
    assert client.get("/v1/detector").json()["rates"] is None


def test_a_rate_computed_with_a_rounding_error_counts_as_itself(serve, tmp_path, detector_folder, files):
    """1 - 0.9 is less than 1/10 in floating point; with 9 calibration images p = 1/10 must raise an alarm."""
    import gepc
    from gepc.conformal.p_values import CalibrationScores
    from gepc.detector.storage import save_detector

    detector = gepc.load_detector(detector_folder)
    low = CalibrationScores.of(np.full(9, -1e9), None)
    save_detector(replace(detector.fitted, reference=low), tmp_path / "det")
    client = serve(tmp_path / "det")
    answer = client.post("/v1/score", files=as_form(files[:1]), data={"alpha": repr(1 - 0.9)}).json()
    assert (answer["results"][0]["p_value"], answer["results"][0]["alarm"]) == (0.1, True)
    assert client.get("/v1/detector", params={"alpha": 1 - 0.9}).json()["guarantee"]["limit"] >= 0.1


def test_a_bad_image_is_an_error_of_its_own(client, files):
    answer = client.post("/v1/score", files=as_form([files[0], b"", b"hello", files[1][:70], files[1]]))
    assert answer.status_code == 200
    errors = [result["error"] for result in answer.json()["results"]]
    assert (errors[0], errors[4]) == (None, None)
    assert [part in error for part, error in zip(("empty", "not an image", "damaged"), errors[1:4], strict=True)]
    assert answer.json()["results"][1]["score"] is None


@pytest.mark.parametrize("quote", ["", '"'])
@pytest.mark.parametrize(("body_end", "status"), [("", 400), ("--b", 400), ("--b--", 200), ("--b--\r\nepilogue", 200)])
def test_a_form_that_is_cut_short_is_refused(client, files, body_end, status, quote):
    """The parser leaves out the last part of such a form, so an image or an option would be missing in the answer."""
    part = b'--b\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n\r\n%s\r\n'
    body = part % files[0] + part % files[1] + body_end.encode()
    headers = {"Content-Type": f"multipart/form-data; boundary={quote}b{quote}"}
    answer = client.post("/v1/score", content=body, headers=headers)
    assert answer.status_code == status
    if status == 400:
        assert "the form cannot be read: its last boundary is missing" in answer.json()["error"]
    else:
        assert len(answer.json()["results"]) == 2


@pytest.mark.parametrize(("query", "form"), [("alpha=0.5&alpha=0.1", {}), ("", {"alpha": ["0.5", "0.1"]})])
def test_an_option_that_is_given_twice_is_refused(client, files, query, form):
    answer = client.post(f"/v1/score?{query}", files=as_form(files[:1]), data=form)
    assert answer.status_code == 422
    assert "given more than once" in answer.json()["error"]


def test_no_good_image_is_422_with_the_reasons(client):
    answer = client.post("/v1/score", files=as_form([b"hello", b""]))
    assert answer.status_code == 422
    assert answer.json()["error"] == "none of the 2 images could be scored"
    assert [result["error"] for result in answer.json()["results"]][1] == "the file is empty"
    one = client.post("/v1/score", files=as_form([b""]))
    assert (one.status_code, one.json()["error"]) == (422, "the file is empty")


def test_maps_are_the_library_s_on_the_common_scale(client, detector, images, files):
    answer = client.post("/v1/score", files=as_form(files[:3]), data={"map": "true", "seen": "true"}).json()
    fields = detector.score_map(images[:3])
    scores = detector.score(images[:3])
    for result, field, score in zip(answer["results"], fields, scores, strict=True):
        assert result["score"] == pytest.approx(score, abs=1e-5)
        heat = np.asarray(_picture(result["map"]))
        assert heat.shape == (16, 16, 4)
        level = np.clip(field / answer["map_scale"], 0, 1)
        assert np.abs(heat[..., 3] / 255 - 0.75 * level).max() < 0.01
        assert np.asarray(_picture(result["seen"])).shape == (16, 16, 3)


def test_the_map_of_an_image_that_is_unusual_as_a_whole_keeps_its_structure(client, files, monkeypatch):
    from gepc.serve import service

    monkeypatch.setattr(service, "readable_range", lambda field, limit: (float(np.median(field)), limit))
    (result,) = client.post("/v1/score", files=as_form(files[:1]), data={"map": "true"}).json()["results"]
    opacity = np.asarray(_picture(result["map"]))[..., 3]
    assert (opacity == 0).mean() == pytest.approx(0.5, abs=0.05)
    assert opacity.max() > 0


def test_heat_laid_over_the_image_is_the_library_s_overlay(client, detector, images, files):
    from gepc.maps.drawing import overlay

    picture = (detector.fitted.preprocessing(images[0]).transpose(1, 2, 0) + 1) / 2
    field = detector.score_map(images[:1])[0]
    wanted = overlay(picture, field, detector.map_limit())
    (result,) = client.post("/v1/score?map=true", files=as_form(files[:1])).json()["results"]
    heat = np.asarray(_picture(result["map"])) / 255
    laid = picture * (1 - heat[..., 3:]) + heat[..., :3] * heat[..., 3:]
    assert np.abs(laid - wanted).max() < 0.01


def _picture(uri):
    return Image.open(io.BytesIO(base64.b64decode(uri.removeprefix("data:image/png;base64,"))))


def test_the_description_of_the_detector_contains_no_path(client, detector, detector_folder):
    answer = client.get("/v1/detector", params={"alpha": 0.2})
    body = answer.json()
    guarantee = detector.guarantee(0.2)
    assert body["guarantee"]["low"] == guarantee.low
    assert body["guarantee"]["sentence"] == str(guarantee)
    assert body["calibration_images"] == 20
    assert body["input"] == {"height": 16, "width": 16, "channels": 3, "resize": "stretch"}
    assert body["limits"]["images_per_request"] == 16
    assert str(detector_folder.parent) not in answer.text
    assert detector_folder.parent.name not in answer.text


@pytest.mark.parametrize(
    ("query", "form", "words"),
    [
        ("?alpha=0.001", {}, "needs at least 999 calibration images"),
        ("?alpha=2", {}, "alpha"),
        ("?alpha=nan", {}, "alpha"),
        ("", {"alpha": "x"}, "alpha"),
        ("?group=day", {}, "fitted without groups"),
        ("?alfa=0.1", {}, "there is no field 'alfa'; did you mean 'alpha'?"),
        ("", {"alfa": "0.1"}, "there is no field 'alfa'; did you mean 'alpha'?"),
        ("", {"mapp": "true"}, "there is no field 'mapp'; did you mean 'map'?"),
        ("", {"image": "x"}, "there is no field 'image'; did you mean 'images'?"),
    ],
)
def test_invalid_options_get_a_message(client, files, query, form, words):
    answer = client.post(f"/v1/score{query}", files=as_form(files[:1]), data=form)
    assert answer.status_code == 422
    assert words in answer.json()["error"]


def test_a_misspelt_field_is_answered_with_the_nearest_one(client, files):
    misspelt = client.post("/v1/score", files=[("image", ("x.png", files[0], "image/png"))])
    assert misspelt.status_code == 422
    assert "there is no field 'image'; did you mean 'images'?" in misspelt.json()["error"]
    described = client.get("/v1/detector?rate=true")
    assert described.status_code == 422
    assert "there is no field 'rate'; did you mean 'rates'? (valid: alpha, rates)" in described.json()["error"]


def test_other_bodies_are_refused(client, files):
    for options in ({}, {"content": files[0], "headers": {"content-type": "image/png"}}, {"json": {"images": []}}):
        answer = client.post("/v1/score", **options)
        assert answer.status_code == 422
        assert "send at least one image file in the field 'images' of a form" in answer.json()["error"]
    text = client.post("/v1/score", data={"images": "text"}, files={"images": b"x"})
    assert text.status_code == 422
    assert text.json()["error"].startswith("send at least one image file in the field 'images'")
    many = client.post("/v1/score", files=as_form(files[:1] * 17))
    assert (many.status_code, many.json()["error"][:9]) == (413, "17 images")
    for kind in ("multipart/form-data", "multipart/form-data; boundary=x"):
        answer = client.post("/v1/score", content=b"--y", headers={"content-type": kind})
        assert answer.status_code == 400
        assert answer.json()["error"].startswith("the form cannot be read: ")
    assert client.get("/v1/score").status_code == 405
    assert client.get("/v1/nothing").json() == {"error": "Not Found"}


def test_names_come_back_without_folders_and_control_characters(client, files):
    for name, plain in (("../../etc/x.png", "x.png"), ("C:\\photos\\y.png", "y.png"), ("a\u202eb.png", "ab.png")):
        answer = client.post("/v1/score", files=as_form(files[:1], name)).json()
        assert answer["results"][0]["name"] == plain


def test_groups_have_their_own_reference(serve, detector_folder, files, images):
    import gepc

    folder = detector_folder.with_name("grouped")
    client, detector = serve(folder), gepc.load_detector(folder)
    refused = client.post("/v1/score", files=as_form(files[:1]))
    assert refused.status_code == 422
    assert "fitted with groups (day, night)" in refused.json()["error"]
    assert "no calibration image" in client.post("/v1/score?group=dusk", files=as_form(files[:1])).json()["error"]
    answer = client.post("/v1/score", files=as_form(files), data={"group": "night"}).json()
    expected = detector.p_value(images, ["night"] * len(images)).tolist()
    assert [result["p_value"] for result in answer["results"]] == expected
    assert client.get("/v1/detector").json()["groups"] == {"day": 30, "night": 30}


def test_health_metrics_and_pages(client, files):
    client.post("/v1/score", files=as_form([files[0], b"bad"]))
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ready"}
    text = client.get("/metrics").text
    for line in ('gepc_requests_total{route="/v1/score",status="200"}', 'gepc_images_total{outcome="failed"}'):
        assert line in text
    assert "gepc_images_in_service 0.0" in text
    assert "gepc_batch_images_bucket" in text
    for path in ("/", "/docs", "/static/app.js", "/static/style.css", "/openapi.json"):
        assert client.get(path).status_code == 200, path


def test_many_concurrent_clients_get_their_own_answers(client, detector, images, files):
    expected = detector.score(images)

    def ask(number):
        order = np.random.default_rng(number).permutation(12)[: 1 + number % 3]
        with_map = {"map": "true"} if number % 2 else {}
        answer = client.post("/v1/score", files=as_form([files[index] for index in order]), data=with_map).json()
        found = [result["score"] for result in answer["results"]]
        return np.abs(np.asarray(found) - expected[order]).max()

    with ThreadPoolExecutor(16) as pool:
        assert max(pool.map(ask, range(48))) < 1e-5
    text = client.get("/metrics").text
    count, images_seen = (float(text.split(f"gepc_batch_images_{name} ")[1].split()[0]) for name in ("count", "sum"))
    assert images_seen > count


class Gate:
    """Holds the network until it is opened."""

    def __init__(self, service):
        self.entered, self.open = threading.Event(), threading.Event()
        self.run = service._batcher._run
        service._batcher._run = self

    def __call__(self, jobs):
        self.entered.set()
        assert self.open.wait(300)
        return self.run(jobs)


def test_a_full_queue_is_503_with_a_time_and_nothing_is_lost(serve, detector_folder, files):
    client = serve(detector_folder, queue=2, max_images=2)
    gate = Gate(client.app.state.service)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(client.post, "/v1/score", files=as_form(files[:2]))
        assert gate.entered.wait(300)
        refused = client.post("/v1/score", files=as_form(files[:1]))
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert "try again" in refused.json()["error"]
        assert client.get("/readyz").status_code == 503
        assert client.get("/healthz").status_code == 200  # the loop is free while the network works
        gate.open.set()
        assert accepted.result(300).status_code == 200
    assert client.post("/v1/score", files=as_form(files[:1])).status_code == 200
    assert client.app.state.service.images.taken == client.app.state.service.held_bytes.taken == 0


def test_a_request_that_takes_too_long_is_504_and_leaves_the_queue(serve, detector_folder, files):
    client = serve(detector_folder, timeout=0.3)
    gate = Gate(client.app.state.service)
    late = client.post("/v1/score", files=as_form(files[:1]))
    gate.open.set()
    assert late.status_code == 504
    assert "within 0.3 s" in late.json()["error"]
    assert client.app.state.service.images.taken == client.app.state.service.held_bytes.taken == 0


def _explode(*_):
    raise RuntimeError("secret /etc/passwd")


def test_an_internal_error_has_a_message_without_a_traceback(serve, detector_folder, files, caplog):
    client = serve(detector_folder)
    client.app.state.service._batcher._run = _explode
    answer = client.post("/v1/score", files=as_form(files[:1]))
    assert (answer.status_code, answer.json()["error"]) == (422, "the image could not be scored")
    client.app.state.service.describe = _explode
    answer = client.get("/v1/detector")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "Content-Security-Policy" in answer.headers
    assert "secret" in caplog.text


def test_the_openapi_document_is_whole(client):
    schema = client.get("/openapi.json").json()
    assert set(schema["paths"]) == {"/v1/score", "/v1/detector", "/healthz", "/readyz", "/metrics"}
    bodies = schema["paths"]["/v1/score"]["post"]["requestBody"]["content"]
    assert set(bodies) == {"multipart/form-data"}


def test_a_latent_backbone_and_five_bands_are_served(serve, tmp_path):
    """Uploads of TIFF and .npy files with further bands, with the bands to show chosen; E is counted."""
    import io

    from families import SIDE, make
    from PIL import Image
    from toys import as_uint8, pictures

    import gepc

    for family, channels, cost in (("LDM", 3, "1E"), ("five bands", 5, "0J")):
        folder = tmp_path / family
        backbone = gepc.load_backbone(folder / "net", device="cpu", **make(family, folder / "net"))
        detector = gepc.create_detector(backbone, "gepc+", "fast", size=SIDE)
        detector.fit(as_uint8(pictures(24, SIDE, channels))).save(folder / "det")
        picture = as_uint8(pictures(1, SIDE, channels, seed=1))[0]
        first, *rest = [Image.fromarray(picture[..., band]) for band in range(channels)]
        tiff, npy = io.BytesIO(), io.BytesIO()
        first.save(tiff, format="TIFF", save_all=True, append_images=rest)
        np.save(npy, picture.transpose(2, 0, 1))
        with pytest.raises(
            gepc.core.errors.OptionError, match=f"one or three bands to show, from 1 to {channels}; got"
        ):
            serve(folder / "det", bands=(7, 2, 1))
        client = serve(folder / "det", bands=(3, 2, 1))
        assert client.get("/v1/detector").json()["passes_per_image"].endswith(cost)
        forms = [("images", (name, data.getvalue(), "image/tiff")) for name, data in (("a.tif", tiff), ("a.npy", npy))]
        answer = client.post("/v1/score", files=forms).json()["results"]
        np.testing.assert_allclose([one["score"] for one in answer], detector.score(picture[None])[0], rtol=1e-4)
        (drawn,) = client.post("/v1/score?seen=true", files=forms[:1]).json()["results"]
        assert np.asarray(_picture(drawn["seen"])).shape == (SIDE, SIDE, 3)


def test_an_explanation_has_the_evidence_of_each_part(serve, explained_folder, files, images, trusted):
    import gepc

    client, form = serve(explained_folder), as_form(files[:2])
    expected = gepc.load_detector(explained_folder, trust=True).explain(images[:2])
    for found, wanted in zip(
        client.post("/v1/score?explain=true", files=form).json()["results"], expected, strict=True
    ):
        assert found["reason"] == wanted.reason
        assert found["evidence"] == pytest.approx(dict(wanted.evidence), rel=1e-3)
    plain = client.post("/v1/score", files=form).json()["results"][0]
    assert "reason" not in plain
