"""The page in a real browser, end to end. `GEPC_SCREENSHOTS=folder` keeps a picture of it."""

import csv
import os
import shutil
from pathlib import Path

import pytest
from PIL import Image
from serving import png
from toys import as_uint8, pictures

playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested with the playwright package")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="the page is tested in chromium, which is not installed"),
    pytest.mark.usefixtures("trusted"),
]

TOKEN = "correct-horse-battery"
FLAGS = ["no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"]
FLAGS += ["disable-component-update", "disable-sync"]
SHOWN = {"gravel": 3, "page": 2, "grass": 1, "moon": 1, "brick": 1}  # patches on the picture, by photograph
PASTE = """async ({ data, name }) => {
    const file = new File([Uint8Array.from(data)], name, { type: "image/png" });
    const carrier = new DataTransfer();
    carrier.items.add(file);
    const target = document.getElementById("drop");
    const init = { bubbles: true, cancelable: true };
    if (name.startsWith("drop")) target.dispatchEvent(new DragEvent("drop", { ...init, dataTransfer: carrier }));
    else target.dispatchEvent(new ClipboardEvent("paste", { ...init, clipboardData: carrier }));
}"""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=[f"--{flag}" for flag in FLAGS])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(live, detector_folder):
    return live(detector_folder)


@pytest.fixture
def open_page(browser):
    """Pages whose every request must stay at the service and whose console must stay silent."""
    contexts, complaints = [], []

    def begin(address, **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)

        def check(request):
            if not request.url.startswith((f"{address}/", "data:", "blob:")):
                complaints.append(request.url)

        page.on("request", check)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if "Security" in message.text else None)
        page.goto(f"{address}/")
        return page

    yield begin
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory, images):
    root = tmp_path_factory.mktemp("pictures")
    for index, image in enumerate(images):
        Image.fromarray(image).save(root / f"{index:02d}.png")
    (root / "broken.png").write_bytes((root / "00.png").read_bytes()[:80])
    return root


def ready(page):
    page.wait_for_selector("html[data-ready]")
    return page


def upload(page, *paths):
    page.set_input_files("#files", [str(path) for path in paths])
    page.wait_for_selector("#progress", state="hidden")


def slide(page, position):
    """Move the slider to a position in [0, 1]."""
    page.evaluate(
        """(position) => { const slider = document.getElementById("alpha");
        slider.value = Math.round(position * slider.max); slider.dispatchEvent(new Event("input")); }""",
        position,
    )


def test_upload_verdict_slider_map_and_a_bad_file(open_page, address, folder, detector, images):
    page = ready(open_page(address))
    assert page.inner_text("#summary") == "No images yet."
    upload(page, *sorted(folder.glob("*.png")))
    cards = page.locator(".card")
    assert cards.count() == 13
    p_values, scores = detector.p_value(images), detector.score(images)
    for index, (p, score) in enumerate(zip(p_values, scores, strict=True)):
        assert float(cards.nth(index).locator(".p").inner_text()) == pytest.approx(p, rel=5e-3)
        assert float(cards.nth(index).locator(".score").inner_text()) == pytest.approx(score, rel=5e-3, abs=1e-3)
    rank = round(p_values[0] * 21)
    words = cards.nth(0).locator(".words").inner_text()
    assert ("None of the 20" if rank == 1 else "normal images ") in words
    bad = cards.nth(12)
    assert "damaged" in bad.locator(".words").inner_text()
    assert bad.locator(".verdict").inner_text() == "Could not be scored"

    requests = []
    page.on("request", lambda request: requests.append(request.url))
    for position in (0, 0.4, 1):
        slide(page, position)
        alpha = float(page.inner_text("#alpha-value").removesuffix(" %")) / 100
        expected = [p <= alpha * 1.01 for p in p_values]
        verdicts = [text == "Unusual" for text in page.locator(".card .verdict").all_inner_texts()]
        assert verdicts == [*expected, False]
        assert f"{sum(expected)} unusual" in page.inner_text("#summary")
    assert "On average at most 50 % of normal images" in page.inner_text("#guarantee")
    slide(page, 0)
    assert "4.8 %" in page.inner_text("#alpha-value")
    assert "allow no smaller rate" in page.inner_text("#guarantee")
    assert requests == []  # decided again without asking the service

    heat = cards.nth(0).locator(".heat")
    assert heat.is_visible()
    assert heat.evaluate("image => [image.naturalWidth, image.naturalHeight]") == [16, 16]
    box, photo = heat.bounding_box(), cards.nth(0).locator(".photo").bounding_box()
    assert box == photo
    page.locator("#opacity").fill("25")
    assert heat.evaluate("image => getComputedStyle(image).opacity") == "0.25"
    assert not bad.locator(".heat").is_visible()


def test_regions_are_drawn_where_the_map_has_them(open_page, address, tmp_path):
    """A smooth square in noise: the boxes on the page are those that the service answers, in pixels of the map."""
    pixels = as_uint8(pictures(1, 16, seed=11))[0].copy()
    pixels[4:10, 5:12] = [255, 0, 0]
    path = tmp_path / "defect.png"
    path.write_bytes(png(pixels))
    page, answers = ready(open_page(address)), []
    page.on("response", lambda response: answers.append(response) if "/v1/score" in response.url else None)
    upload(page, path)
    (regions,) = [result["regions"] for answer in answers for result in answer.json()["results"]]
    assert regions
    boxes = page.locator(".card .regions div")
    boxes.first.wait_for(state="attached")
    assert boxes.count() == len(regions)
    heat = page.locator(".card .heat").bounding_box()
    for place, region in enumerate(regions):
        box = boxes.nth(place).bounding_box()
        for side, start, end in (("x", "left", "right"), ("y", "top", "bottom")):
            length = "width" if side == "x" else "height"
            scale = heat[length] / 16
            assert box[side] == pytest.approx(heat[side] + scale * region[start], abs=1)
            assert box[length] == pytest.approx(scale * (region[end] - region[start]), abs=1)
        assert f"{region['area']} pixel" in boxes.nth(place).get_attribute("title")


def test_polygons_become_the_mask_that_fit_takes(open_page, address, tmp_path):
    """Two regions of a large image, with a corner taken back; the file is what `ignore` reads, to the pixel."""
    from gepc.images.preprocessing import Mask

    Image.fromarray(as_uint8(pictures(1, (300, 400)))[0]).save(tmp_path / "part.png")
    page = ready(open_page(address))
    upload(page, tmp_path / "part.png")
    page.get_by_role("button", name="Draw regions to ignore").click()
    canvas = page.locator("#mask-canvas")
    box = canvas.bounding_box()
    assert box["width"] / box["height"] == pytest.approx(4 / 3, rel=0.01)
    assert page.locator("#mask-download").is_disabled()

    def click(*corners):
        for x, y in corners:
            canvas.click(position={"x": x / 400 * box["width"], "y": y / 300 * box["height"]})

    click((40, 30), (120, 30), (120, 90), (40, 90))
    page.click("#mask-next")
    click((200, 200), (380, 210), (300, 280), (20, 20))
    page.click("#mask-undo")
    assert page.inner_text("#mask-count") == "2 regions"
    if (place := os.environ.get("GEPC_SCREENSHOTS")) is not None:
        page.screenshot(path=Path(place) / "mask.png")
    with page.expect_download() as download:
        page.click("#mask-download")
    download.value.save_as(tmp_path / "mask.png")
    ignored = Mask.of(tmp_path / "mask.png").array((300, 400))
    assert ignored[34:86, 44:116].all()
    assert ignored[225, 300]
    assert not ignored[:26].any()
    assert not ignored[96:194].any()
    assert ignored.mean() == pytest.approx((80 * 60 + 6700) / 120_000, rel=0.05)
    page.click("#mask-close")
    assert not canvas.is_visible()


def test_a_photograph_taken_on_its_side_is_shown_as_it_is_scored(open_page, address, tmp_path):
    """The camera's orientation turns both the photograph and its map upright."""
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(as_uint8(pictures(1, (40, 80)))[0]).save(tmp_path / "side.jpg", exif=turned)
    page = ready(open_page(address))
    upload(page, tmp_path / "side.jpg")
    photo, heat = (page.locator(f".card {name}").bounding_box() for name in (".photo", ".heat"))
    assert photo == heat
    assert photo["height"] == pytest.approx(2 * photo["width"], rel=0.01)


def test_the_page_decides_by_the_limits_of_the_service(open_page, address, folder, detector, images):
    page = open_page(address)
    p_values = detector.p_value(images)
    limit = sorted(p_values)[5]

    def with_other_limits(route):
        answer = route.fetch()
        body = answer.json()
        for rate in body["rates"]:
            rate["limit"] = limit
        route.fulfill(response=answer, json=body)

    page.route("**/v1/detector?rates=true", with_other_limits)
    page.reload()
    ready(page)
    upload(page, *sorted(folder.glob("0*.png")))
    for position in (0, 1):
        slide(page, position)
        verdicts = [text == "Unusual" for text in page.locator(".card .verdict").all_inner_texts()]
        assert verdicts == [p <= limit for p in p_values[:10]]


def test_paste_drop_order_history_csv_and_clear(open_page, address, folder, images, tmp_path):
    page = ready(open_page(address))
    for name, index in (("pasted.png", 3), ("dropped.png", 4)):
        page.evaluate(PASTE, {"data": list(png(images[index])), "name": name})
    page.wait_for_selector("#progress", state="hidden")
    upload(page, folder / "05.png", folder / "broken.png")
    page.select_option("#sort", "unusual")
    shown = [float(text) for text in page.locator(".card:not(.failed) .p").all_inner_texts()]
    assert shown == sorted(shown)
    page.click("summary")
    assert page.locator("#history tr").count() == 4
    with page.expect_download() as download:
        page.click("#csv")
    download.value.save_as(tmp_path / "scores.csv")
    rows = list(csv.DictReader((tmp_path / "scores.csv").read_text().splitlines()))
    assert [row["image"] for row in rows] == ["pasted.png", "dropped.png", "05.png", "broken.png"]
    assert [row["alarm"] for row in rows][3] == ""
    assert "damaged" in rows[3]["error"]
    page.reload()
    ready(page)
    assert page.locator("#history tr").count() == 4  # the visit outlives a reload of the page
    page.click("#clear")
    assert page.locator("#history tr").count() == page.locator(".card").count() == 0
    assert page.locator("#csv").is_disabled()


@pytest.mark.parametrize("width", [390, 800, 1280])
def test_the_guarantee_changes_and_no_button_moves(open_page, address, width):
    """A longer text must not push a button away from under the pointer."""
    page = ready(open_page(address, viewport={"width": width, "height": 900}))
    places = set()
    for position in (None, 0, 0.5, 1):
        if position is not None:
            slide(page, position)
        assert "with probability 0.9" in page.inner_text("#guarantee")
        places.add(page.locator("#clear").bounding_box()["y"])
    assert len(places) == 1


def test_the_history_keeps_the_order_in_which_images_came(open_page, address, folder):
    page = ready(open_page(address))
    held = []

    def overtaken(route):
        if held:
            route.continue_()
        else:
            held.append(route)

    page.route("**/v1/score", overtaken)
    page.set_input_files("#files", [str(folder / "00.png")])
    page.set_input_files("#files", [str(folder / "01.png")])
    page.locator("#history tr").wait_for(state="attached")
    held[0].continue_()
    page.wait_for_selector("#progress", state="hidden")
    assert page.locator("#history th").all_text_contents() == ["01.png", "00.png"]  # the newest on top


def test_many_files_and_a_format_that_browsers_do_not_show(open_page, address, tmp_path):
    for index, image in enumerate(as_uint8(pictures(39, 16, seed=11))):
        Image.fromarray(image).save(tmp_path / f"{index:02d}.png")
    Image.fromarray(as_uint8(pictures(1, 16, seed=12))[0]).save(tmp_path / "39.tiff")
    page = ready(open_page(address))
    upload(page, *sorted(tmp_path.iterdir()))
    assert page.inner_text("#summary").startswith("40 images")
    assert page.locator(".card.normal, .card.unusual").count() == 40
    tiff = page.locator(".card").nth(39).locator(".photo")
    page.wait_for_function("image => image.naturalWidth === 16", arg=tiff.element_handle())


def test_keyboard_and_names_for_screen_readers(open_page, address, folder):
    page = ready(open_page(address))
    upload(page, folder / "00.png")
    order = []
    for _ in range(7):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert order[:6] == ["files", "alpha", "opacity", "sort", "csv", "clear"]
    page.focus("#alpha")
    before = page.inner_text("#alpha-value")
    for _ in range(40):
        page.keyboard.press("ArrowRight")
    assert page.inner_text("#alpha-value") != before
    assert page.get_attribute("#alpha", "aria-valuetext") == page.inner_text("#alpha-value")
    assert page.get_attribute("#summary", "aria-live") == "polite"
    assert page.get_by_label("False-alarm rate").count() == 1
    assert page.locator(".photo").get_attribute("alt") == "00.png"
    unnamed = "e => e.filter(x => !(x.labels?.length || x.textContent.trim() || x.ariaLabel)).map(x => x.outerHTML)"
    assert page.locator("button:visible, input:visible, select:visible").evaluate_all(unnamed) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_in_both_colours(open_page, address, folder, scheme):
    phone = {"viewport": {"width": 390, "height": 844}, "color_scheme": scheme}
    page = ready(open_page(address, **phone))
    upload(page, folder / "00.png", folder / "broken.png")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
    page.get_by_role("button", name="Draw regions to ignore").first.click()
    dialog = page.locator("#mask").bounding_box()
    assert dialog["x"] >= 0
    assert dialog["x"] + dialog["width"] <= 390
    assert page.evaluate("document.getElementById('mask').scrollWidth <= document.getElementById('mask').clientWidth")
    if (place := os.environ.get("GEPC_SCREENSHOTS")) is not None:
        page.screenshot(path=Path(place) / f"mask-phone-{scheme}.png")


def test_the_page_asks_for_a_token_and_keeps_it_in_the_tab(open_page, live, detector_folder, folder):
    page = open_page(live(detector_folder, token=TOKEN))
    page.wait_for_selector("#token-form:visible")
    page.fill("#token", "not the token, no")
    page.keyboard.press("Enter")
    page.wait_for_selector("#problem:visible")
    page.fill("#token", TOKEN)
    page.keyboard.press("Enter")
    ready(page)
    upload(page, folder / "00.png")
    assert page.locator(".card.normal, .card.unusual").count() == 1
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]


def test_the_api_page_lists_every_endpoint(open_page, address):
    page = open_page(address)
    page.goto(f"{address}/docs")
    page.wait_for_selector(".endpoint")
    assert page.locator(".endpoint").count() == 5
    assert "POST /v1/score" in page.inner_text("#endpoints")


def test_a_picture_of_the_page(open_page, live, tmp_path):
    """The detector of `gepc demo` on patches of its photographs; drawn only when asked for, it takes a minute."""
    if "GEPC_SCREENSHOTS" not in os.environ:
        pytest.skip("set GEPC_SCREENSHOTS to a folder to draw the page for the documentation")
    import gepc
    from gepc.core.options import DEFAULT_BACKBONE
    from gepc.lab.report import demo

    pytest.importorskip("skimage", reason="the photographs come with scikit-image")
    fit, held_out = demo.patches(demo.INSIDE, demo.FIT_ROWS), demo.patches(demo.INSIDE, demo.TEST_ROWS)
    calibration, new = held_out[:59], held_out[59:]
    gepc.create_detector(gepc.load_backbone(DEFAULT_BACKBONE)).fit(fit, calibration).save(tmp_path / "det")
    for name, count in SHOWN.items():
        patches = new if name == demo.INSIDE else demo.patches(name)
        for index, patch in enumerate(patches[:count]):
            Image.fromarray(patch.squeeze()).save(tmp_path / f"{name}-{index + 1}.png")
    page = ready(open_page(live(tmp_path / "det"), viewport={"width": 1280, "height": 1850}))
    upload(page, *sorted(tmp_path.glob("*.png")))
    page.select_option("#sort", "unusual")
    out = Path(os.environ["GEPC_SCREENSHOTS"])
    out.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=out / "serve.png")


def test_a_card_lists_the_parts_of_the_score_and_marks_the_reason(open_page, live, explained_folder, images, folder):
    import gepc

    page = ready(open_page(live(explained_folder)))
    upload(page, folder / "00.png")
    slide(page, 1.0)
    (expected,) = gepc.load_detector(explained_folder, trust=True).explain(images[:1])
    lines = page.locator(".reasons li").all_inner_texts()
    assert {line.partition(":")[0] for line in lines} == set(expected.evidence)
    shown = [float(line.partition("= ")[2]) for line in lines]
    assert shown == sorted(shown)
    assert page.locator(".reasons .reason").inner_text().startswith(f"{expected.reason}:")
    if (place := os.environ.get("GEPC_SCREENSHOTS")) is not None:
        page.screenshot(path=Path(place) / "reasons.png", full_page=True)
