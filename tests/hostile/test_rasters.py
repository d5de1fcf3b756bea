"""GDAL opens the file it was given, by an allow-list of drivers, and nothing that the file or its neighbours name."""

from __future__ import annotations

import http.server
import threading
from pathlib import Path

import numpy as np
import pytest

from gepc.core.errors import InputError
from gepc.images.formats import read_file
from gepc.scenes.reading import PIXELS, open_scene

rasterio = pytest.importorskip("rasterio")
pytestmark = pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")

BAND = """<VRTDataset rasterXSize="32" rasterYSize="32"><VRTRasterBand dataType="Byte" band="1"{kind}>{source}
</VRTRasterBand></VRTDataset>"""
RAW = """<SourceFilename relativeToVRT="0">{target}</SourceFilename>
<ImageOffset>0</ImageOffset><PixelOffset>1</PixelOffset><LineOffset>8</LineOffset>"""
SIMPLE = """<SimpleSource><SourceFilename relativeToVRT="0">{target}</SourceFilename><SourceBand>1</SourceBand>
</SimpleSource>"""
WMS = """<GDAL_WMS><Service name="TMS"><ServerUrl>{target}</ServerUrl></Service><DataWindow><UpperLeftX>0</UpperLeftX>
<UpperLeftY>0</UpperLeftY><LowerRightX>1</LowerRightX><LowerRightY>1</LowerRightY><TileLevel>1</TileLevel>
</DataWindow><Projection>EPSG:4326</Projection><BandsCount>1</BandsCount></GDAL_WMS>"""


def tiff(path: Path, value: int) -> Path:
    with rasterio.open(path, "w", driver="GTiff", height=32, width=32, count=1, dtype="uint8") as file:
        file.write(np.full((1, 32, 32), value, dtype=np.uint8))
    return path


@pytest.fixture
def server():
    """A web server on this machine; the paths that it was asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}", asked
        listening.shutdown()
        thread.join()


def texts(secret: Path, url: str) -> dict[str, str]:
    return {
        "raw bytes of a file": BAND.format(kind=' subClass="VRTRawRasterBand"', source=RAW.format(target=secret)),
        "another raster": BAND.format(kind="", source=SIMPLE.format(target=secret)),
        "a URL": BAND.format(kind="", source=SIMPLE.format(target=f"/vsicurl/{url}/secret.tif")),
        "a map server": WMS.format(target=f"{url}/${{z}}/${{x}}/${{y}}"),
        "a web address": f"{url}/secret.tif",
    }


@pytest.mark.parametrize("suffix", ["tif", "vrt", "xml", "jp2", "img"])
def test_a_file_that_names_others_is_refused(tmp_path: Path, server: tuple[str, list[str]], suffix: str) -> None:
    url, asked = server
    for what, text in texts(tiff(tmp_path / "secret.tif", 7), url).items():
        path = tmp_path / f"scene.{suffix}"
        path.write_text(text)
        with pytest.raises(InputError, match="is not an image that can be"):
            open_scene(path, channels=1)
        with pytest.raises(InputError, match="is not an image that can be decoded"):
            read_file(path)
        assert asked == [], what


def test_neighbours_of_a_file_are_not_read(tmp_path: Path, server: tuple[str, list[str]], monkeypatch) -> None:
    """Masks, overviews and side-car files may be VRTs in turn; the environment cannot bring them back."""
    url, asked = server
    for name, value in {"GDAL_DISABLE_READDIR_ON_OPEN": "FALSE", "GDAL_PAM_ENABLED": "YES"}.items():
        monkeypatch.setenv(name, value)
    scene, secret = tiff(tmp_path / "scene.tif", 9), tiff(tmp_path / "secret.tif", 0)
    for neighbour in ("scene.tif.msk", "scene.tif.ovr", "scene.msk"):
        (tmp_path / neighbour).write_text(texts(secret, url)["another raster"])
    (tmp_path / "scene.tfw").write_text("2\n0\n0\n-2\n100\n100\n")
    sidecar = '<PAMDataset><PAMRasterBand band="1"><NoDataValue>9</NoDataValue></PAMRasterBand></PAMDataset>'
    (tmp_path / "scene.tif.aux.xml").write_text(sidecar)
    opened = open_scene(scene, channels=1)
    pixels: list[np.ndarray] = []
    reading = threading.Thread(target=lambda: pixels.extend(opened.read(0, 0, 32, 32)))  # options may be per thread
    reading.start()
    reading.join()
    opened.close()
    assert (pixels[0] == 9).all()
    assert pixels[1].all()
    assert opened.place == PIXELS
    assert asked == []
