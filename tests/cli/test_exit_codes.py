"""Commands whose images all fail say so in their last line and end with exit code 1."""

import pytest
from PIL import Image
from toys import as_uint8, pictures


@pytest.fixture(scope="module")
def place(tmp_path_factory, plain_net):
    from diffusers import DDPMScheduler

    import gepc

    root = tmp_path_factory.mktemp("codes")
    plain_net.save_pretrained(root / "net")
    DDPMScheduler(beta_schedule="squaredcos_cap_v2").save_pretrained(root / "net")
    detector = gepc.GEPC(gepc.load_backbone(str(root / "net")), levels=(0.97, 0.9), keep=1)
    detector.fit(as_uint8(pictures(60, 16))).save(root / "det")
    for name in ("broken", "mixed"):
        (root / name).mkdir()
        (root / name / "a.png").write_bytes(b"no image")
        (root / name / "b.png").write_bytes(b"no image, too")
    Image.fromarray(as_uint8(pictures(1, 16))[0]).save(root / "mixed" / "c.png")
    return root


@pytest.mark.parametrize("command", [("score", "--out", "s.csv"), ("score",), ("map", "--out", "maps")])
def test_a_run_without_one_scored_image_ends_with_1(place, gepc, command):
    name, *options = command
    run = gepc(name, "det", "broken", *options)
    assert run.returncode == 1, run.stderr
    assert run.stderr.splitlines()[-1].startswith("error: none of the 2 images could be scored")
    if "--out" in options:
        assert (place / options[1]).exists()  # the reasons are written all the same


@pytest.mark.parametrize("command", [("score", "--out", "m.csv"), ("map", "--out", "more")])
def test_a_run_with_a_scored_image_ends_with_0(place, gepc, command):
    name, *options = command
    run = gepc(name, "det", "mixed", *options)
    assert run.returncode == 0, run.stderr
    assert "none of" not in run.stderr
