"""A small detector on disk, and services made of it."""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path

import pytest
from toys import as_uint8, pictures

pytest.importorskip("fastapi", reason="serving needs gepc[serve]")
sys.path.insert(0, str(Path(__file__).parent))  # serving.py, which is imported by name

from serving import png


@pytest.fixture(scope="session")
def detector_folder(tmp_path_factory, tiny_net):
    """A random UNet, and two detectors fitted on it: `det` and, with another seed, `other`."""
    from diffusers import DDPMScheduler

    import gepc

    root = tmp_path_factory.mktemp("served")
    tiny_net.save_pretrained(root / "net")
    DDPMScheduler(beta_schedule="squaredcos_cap_v2").save_pretrained(root / "net")
    backbone = gepc.load_backbone(str(root / "net"))
    images = as_uint8(pictures(60, 16))
    for name, seed in (("det", 0), ("other", 1)):
        gepc.GEPC(backbone, levels=(0.99, 0.9), size=16, seed=seed).fit(images).save(root / name)
    labels = ["day", "night"] * 30
    gepc.GEPC(backbone, levels=(0.99, 0.9), size=16, calibration_share=0.5).fit(
        images, calibration_images=as_uint8(pictures(60, 16, seed=3)), groups=labels
    ).save(root / "grouped")
    return root / "det"


@pytest.fixture(scope="session")
def explained_folder(detector_folder):
    """A detector whose score has parts."""
    import gepc

    folder = detector_folder.with_name("explained")
    backbone = gepc.load_backbone(str(detector_folder.with_name("net")))
    gepc.create_detector(backbone, size=16, maps="raw").fit(as_uint8(pictures(60, 16))).save(folder)
    return folder


@pytest.fixture(scope="session")
def detector(detector_folder):
    import gepc

    return gepc.load_detector(detector_folder, trust=True)


@pytest.fixture
def replaceable(detector_folder, tmp_path):
    """A copy that a test may replace."""
    return shutil.copytree(detector_folder, tmp_path / "det")


@pytest.fixture(scope="session")
def images():
    """Twelve arrays of a size that is not the network's; none far out, where the score is steep and so rounding."""
    return list(as_uint8(pictures(12, (24, 20), seed=7, contrast=0.55)))


@pytest.fixture(scope="session")
def files(images):
    return [png(image) for image in images]


@pytest.fixture
def serve():
    """Make clients of services in this process; all are closed at the end."""
    from starlette.testclient import TestClient

    from gepc.serve import Settings, create_app

    open_clients = []

    def make(folder, **settings):
        client = TestClient(create_app(folder, Settings(**settings)), base_url="http://127.0.0.1:8000")
        client.__enter__()
        open_clients.append(client)
        return client

    yield make
    for client in open_clients:
        client.__exit__(None, None, None)


@pytest.fixture(scope="module")
def client(detector_folder, trusted):
    from starlette.testclient import TestClient

    from gepc.serve import Settings, create_app

    settings = Settings(max_pixels=100_000, max_bytes=2_000_000, max_images=16)
    with TestClient(create_app(detector_folder, settings), base_url="http://127.0.0.1:8000") as client:
        yield client


@pytest.fixture(scope="session")
def live():
    """Serve detectors on free ports of this machine, in threads; gives the address."""
    from gepc.serve import Settings, create_app, listen
    from gepc.serve.server import address, make_server

    running = []

    def begin(folder, **settings):
        app = create_app(folder, Settings(**settings))
        listener, server = listen("127.0.0.1", 0), make_server(app)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        running.append((server, thread, listener))
        return address(listener).rstrip("/")

    yield begin
    for server, thread, listener in running:
        server.should_exit = True
        thread.join(300)
        listener.close()
