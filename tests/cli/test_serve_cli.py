"""`gepc serve` says what is wrong before it serves anything; serving itself is tested in tests/serve."""

import json
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi", reason="serving needs gepc[serve]")

pytestmark = pytest.mark.usefixtures("trusted")


@pytest.fixture
def gepc(tmp_path, monkeypatch, capsys):
    from gepc.cli.app import run

    def call(*arguments):
        monkeypatch.chdir(tmp_path)
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "nowhere contains no detector"),
        (["det", "--host", "0.0.0.0"], "give --token"),
        (["det", "--host", "0.0.0.0", "--token", "short"], "at least 16 characters"),
        (["det", "--token", "short"], "at least 16 characters"),
        (["det", "--queue", "3"], "queue (3) must be at least max_images (64)"),
        (["det", "--max-megabytes", "0"], "max_bytes must be at least 1"),
        (["det", "--port", "70000"], "--port"),
        (["det", "--host", "256.1.1.1", "--token", "0123456789abcdef"], "cannot listen on 256.1.1.1"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(gepc, arguments, sentence):
    free = [] if "--port" in arguments else ["--port", "0"]
    code, _, error = gepc("serve", *arguments, *free)
    assert code == 2
    assert sentence in error
    assert "Traceback" not in error


def test_a_port_that_is_taken_is_said_before_the_weights_are_read(gepc):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, error = gepc("serve", "det", "--port", taken.getsockname()[1])
    assert code == 2
    assert "cannot listen" in error


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'gepc[serve]'"),
        ({"url": "https://example.org/gepc.git", "vcs_info": {}}, "pip install 'gepc[serve]'"),
        ({"url": "file:///src/my%20gepc", "dir_info": {}}, "pip install '/src/my gepc[serve]'"),
        ({"url": "file:///src/gepc", "dir_info": {"editable": True}}, "pip install --editable '/src/gepc[serve]'"),
        ({"url": "file:///w/gepc-1-py3-none-any.whl"}, "pip install '/w/gepc-1-py3-none-any.whl[serve]'"),
    ],
)
def test_a_missing_extra_is_one_sentence(gepc, monkeypatch, origin, command):
    """With the command that installs it from where the package itself came from."""
    record = SimpleNamespace(read_text=lambda name: origin and json.dumps(origin))
    monkeypatch.setattr(sys.modules["gepc.cli.app"], "distribution", lambda name: record)
    monkeypatch.setitem(sys.modules, "gepc.serve", None)
    code, _, error = gepc("serve", "det")
    assert (code, error) == (2, f"error: serving needs more packages; install with: {command}\n")


def test_help_shows_an_example_and_the_web_framework_stays_unloaded(gepc):
    code, out, _ = gepc("serve", "--help")
    assert code == 0
    assert "gepc serve" in out.split("Example", 1)[1]
    line = "import sys, gepc.cli; sys.exit('fastapi' in sys.modules or 'uvicorn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", line], timeout=300).returncode == 0
