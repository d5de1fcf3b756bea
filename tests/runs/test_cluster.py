"""The cluster engine on a real Ray cluster of two nodes: the local engine's rows, also when a node dies."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import make
from PIL import Image
from safetensors.numpy import save_file
from toys import as_uint8, pictures

import gepc
from gepc.detector.stream import Result
from gepc.images.sources import open_images
from gepc.runs.shards import Identity, ScoreRun, Shard, open_run, parse_shard, score_shards, shard_text

ray = pytest.importorskip("ray", reason="a cluster needs ray: pip install 'gepc[ray]'")
from gepc.runs.cluster import (  # noqa: E402
    Cluster,
    DetectorPayload,
    ScoreActor,
    reason_of,
    score_shards_on_cluster,
    work_item,
)

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("trusted")]
STORE = 100 * 2**20
CPUS_PER_ACTOR = 2  # an actor fits on a worker node with a processor to spare, and not on the head


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, plain_net: Any) -> Path:
    """A saved detector and 24 images, one of them damaged."""
    from diffusers import DDPMScheduler

    root = tmp_path_factory.mktemp("cluster")
    plain_net.save_pretrained(root / "net")
    DDPMScheduler(beta_schedule="squaredcos_cap_v2").save_pretrained(root / "net")
    detector = gepc.GEPC(gepc.load_backbone(root / "net"), levels=(0.99, 0.9), keep=1, group=("flip_x",))
    detector.fit(pictures(66, 16, seed=0)).save(root / "det")
    (root / "new").mkdir()
    for index, picture in enumerate(as_uint8(pictures(24, 16, seed=1))):
        Image.fromarray(picture).save(root / "new" / f"{index:02d}.png")
    (root / "new" / "05.png").write_bytes(b"not an image")
    return root


@pytest.fixture(scope="module", autouse=True)
def settings() -> Iterator[None]:
    """Ray's processes find the packages, start when they are needed, and have time to start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        patch.setenv("RAY_worker_register_timeout_seconds", "300")
        patch.setenv("RAY_agent_register_timeout_ms", "300000")
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        yield


@pytest.fixture(scope="module")
def nodes(settings: None) -> Iterator[Any]:
    """A head, which is too small for actors, and a node that does the work; stopped whatever happened."""
    from ray.cluster_utils import Cluster as LocalCluster

    cluster = LocalCluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False},
    )
    try:
        cluster.add_node(num_cpus=3, object_store_memory=STORE)
        cluster.wait_for_nodes(timeout=300)
        yield cluster
    finally:
        if ray.is_initialized():
            ray.shutdown()
        cluster.shutdown()


def rows(run: ScoreRun) -> list[Result]:
    return [result for results in run.results() for result in results]


def assert_as_local(run: ScoreRun, place: Path, source: str, tmp_path: Path) -> None:
    images = open_images(source)
    detector = gepc.load_detector(place / "det")
    local = open_run(tmp_path / "local", Identity.of(detector.fitted, images))
    score_shards(local, local.pending(), detector.fitted, images)
    expected = rows(local)
    found = rows(run)
    assert [(r.index, r.name, r.error) for r in found] == [(r.index, r.name, r.error) for r in expected]
    for column in ("score", "p_value"):
        np.testing.assert_allclose(
            [getattr(r, column) for r in found], [getattr(r, column) for r in expected], atol=1e-5, rtol=1e-5
        )


class KillsANode(ScoreRun):
    """Once the first shard is back another node joins, and the one that it came from dies without a word."""

    cluster: Any = None

    def write(self, shard: Shard, results: Any) -> None:
        super().write(shard, results)
        if self.cluster is not None:
            (victim,) = self.cluster.worker_nodes
            self.cluster.add_node(num_cpus=3, object_store_memory=STORE)
            self.cluster.remove_node(victim, allow_graceful=False)
            self.cluster = None


def test_a_node_that_dies_costs_no_row(place: Path, nodes: Any, tmp_path: Path) -> None:
    source = str(place / "new")
    images = open_images(source)
    detector = gepc.load_detector(place / "det")
    open_run(tmp_path / "run", Identity.of(detector.fitted, images), 1)
    run = KillsANode(tmp_path / "run", len(images), 1, "parquet")
    run.cluster = nodes
    payload = DetectorPayload.of(place / "det", None, batch_size=8)
    score_shards_on_cluster(run, payload, images, source, Cluster(nodes.address, 1, CPUS_PER_ACTOR))
    assert run.cluster is None
    assert len(nodes.worker_nodes) == 1
    assert_as_local(run, place, source, tmp_path)


def test_the_command_line_on_a_cluster(
    place: Path, nodes: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Relative paths are scored into Parquet by a detector on a network with embeddings, without words of Ray."""
    import pyarrow.parquet as pq

    from gepc.cli.app import run

    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.chdir(place)
    save_file(make("Stable Diffusion", place / "sd")["embeddings"], place / "text.safetensors")
    near = gepc.create_detector(gepc.load_backbone("sd", embeddings="text.safetensors"), levels=(0.99, 0.9))
    with pytest.warns(UserWarning, match="1 of 24 images left out"):
        near.fit(place / "new").save("far")
    cluster = ["--engine", "ray", "--address", nodes.address, "--actors", "1", "--cpus-per-actor", str(CPUS_PER_ACTOR)]
    command = ["score", "far", "new", "--out", "far.parquet", "--shard-size", "10", "--alpha", "0.2", *cluster]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run(command) == 0
    said = capfd.readouterr().err
    assert "ray_remote_args" not in said
    assert "core_worker" not in said

    table = pq.read_table(place / "far.parquet").to_pylist()
    assert [row["path"] for row in table] == [f"new/{index:02d}.png" for index in range(24)]
    assert table[5]["error"] == "is not an image that can be decoded"
    scores = [np.nan if row["score"] is None else row["score"] for row in table]
    np.testing.assert_allclose(scores, [result.score for result in near.results(place / "new")], atol=1e-4)


def answer(actor: ScoreActor, item: dict[str, Any]) -> list[Result]:
    (text,) = actor({name: [value] for name, value in item.items()})["text"]
    return parse_shard(text)


@pytest.mark.parametrize("kind", ["array", "address", "files"])
def test_what_an_actor_does_with_a_shard(place: Path, kind: str) -> None:
    """The actor's own code, without a cluster around it."""
    np.savez(place / "stack.npz", x=as_uint8(pictures(5, 16, seed=3)))
    given = {"array": f"{place}/stack.npz:x", "address": f"file://{place}/new", "files": str(place / "new")}[kind]
    images = open_images(given)
    expected = list(gepc.load_detector(place / "det").results(images))[2:5]
    actor = ScoreActor(
        DetectorPayload.of(place / "det", None, batch_size=2), Path.cwd(), given if kind == "array" else None
    )
    found = answer(actor, work_item(Shard(0, 2, 5), images, None))
    assert [row.index for row in found] == [2, 3, 4]
    np.testing.assert_allclose([row.score for row in found], [result.score for result in expected], atol=1e-5)
    if kind != "array":
        assert [row.name for row in found] == [result.name for result in expected]


@pytest.mark.parametrize("given", [None, "moved"])
def test_actors_load_the_backbone_with_its_own_options(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """A backbone at a relative path, loaded in bfloat16 with a changed schedule, gives the same rows on a node."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(place / "net", "net")
    Path("schedule.yaml").write_text("beta_schedule: linear\n")
    backbone = gepc.load_backbone("net", config="schedule.yaml", dtype="bfloat16", device="cpu")
    detector = gepc.GEPC(backbone, levels=(0.99, 0.9), keep=1, group=("flip_x",)).fit(pictures(66, 16, seed=0))
    detector.save("det")
    images = pictures(5, 16, seed=3)
    np.save("stack.npy", images)
    expected = [result.score for result in detector.results(images)]
    if given is not None:
        Path("net").rename(given)
    payload = DetectorPayload.of(Path("det"), given, batch_size=2)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # where a process of the cluster starts
    actor = ScoreActor(payload, tmp_path, "stack.npy")
    assert actor.fitted.backbone.load_options["dtype"] == "bfloat16"
    found = answer(actor, work_item(Shard(0, 0, 5), open_images("stack.npy"), None))
    np.testing.assert_array_equal([row.score for row in found], expected)


def test_a_directory_that_a_node_does_not_have(place: Path, tmp_path: Path) -> None:
    """It does not matter to images at absolute paths or URLs."""
    here = Path.cwd()
    actor = ScoreActor(DetectorPayload.of(place / "det", None, batch_size=2), tmp_path / "nowhere", None)
    assert Path.cwd() == here
    assert len(answer(actor, work_item(Shard(0, 0, 2), open_images(str(place / "new")), None))) == 2


def test_a_backbone_that_the_nodes_cannot_load(place: Path) -> None:
    with pytest.raises(gepc.core.errors.GepcError, match="nowhere"):
        DetectorPayload.of(place / "det", "nowhere", batch_size=2).build()


def test_without_an_address_a_cluster_is_started_here_whatever_ran_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # a cluster that is no more
    with Cluster().joined() as joined:
        assert joined.is_initialized()
        assert len(joined.nodes()) == 1
    assert not ray.is_initialized()


def test_the_reason_of_a_failure_is_its_last_line() -> None:
    assert reason_of(RuntimeError("trace\n  File x\n\nBackboneError: no weights\n")) == "BackboneError: no weights"
    assert reason_of(RuntimeError()) == "RuntimeError"


class NoCluster(Cluster):
    """Ray's names without a cluster behind them."""

    @contextlib.contextmanager
    def joined(self) -> Iterator[Any]:
        import ray.data

        yield ray


@pytest.mark.parametrize("shards_each_time", [1, 0])
def test_a_cluster_that_stands_still_is_asked_again_while_it_gets_on(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards_each_time: int
) -> None:
    """Actors of a lost node may wait for ever; Ray then gives up, and what is missing is handed out anew."""
    from ray.data.exceptions import ExecutionTimeoutError

    from gepc.runs import cluster

    asked: list[int] = []

    def standing_still(ray: Any, work: list[dict[str, Any]], *others: Any) -> Iterator[dict[str, Any]]:
        asked.append(len(work))
        for item in work[:shards_each_time]:
            rows = [Result(index, str(index), 0.0, 1.0) for index in range(item["start"], item["stop"])]
            yield {"shard": item["shard"], "text": shard_text(rows)}
        if work[shards_each_time:]:
            raise ExecutionTimeoutError("no progress for 1800 s")

    monkeypatch.setattr(cluster, "_scored", standing_still)
    run = ScoreRun(tmp_path, 24, 8)
    payload, source = DetectorPayload({}, None, 2), str(place / "new")
    if shards_each_time:
        score_shards_on_cluster(run, payload, open_images(source), source, NoCluster())
        assert asked == [3, 2, 1]
        assert [result.index for result in rows(run)] == list(range(24))
    else:
        with pytest.raises(gepc.core.errors.GepcError, match=r"gave up: no progress.*Run it again"):
            score_shards_on_cluster(run, payload, open_images(source), source, NoCluster())
        assert asked == [3]
