"""Where networks run, and how exactly."""

from __future__ import annotations

import os
import sys

import pytest
import torch

import gepc
from gepc.backbones import devices
from gepc.cli.app import run


def flags() -> tuple[object, ...]:
    cudnn = torch.backends.cudnn
    return (
        torch.backends.cuda.matmul.allow_tf32,
        cudnn.allow_tf32,
        cudnn.benchmark,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


EXACT = (False, False, False, True, True, ":4096:8")


def test_deterministic_sets_and_restores_what_torch_computes_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = flags()
    assert before != EXACT
    inside = []

    def failing() -> None:
        with gepc.deterministic():
            inside.append(flags())
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert inside == [EXACT]
    assert flags() == before


def test_a_command_is_deterministic_if_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(sys.modules["gepc.cli.app"], "_run", lambda _: seen.append(flags()) or 0)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    run([])
    monkeypatch.setenv("GEPC_DETERMINISTIC", "1")
    run([])
    assert seen[0] != EXACT
    assert seen[1] == EXACT


@pytest.mark.parametrize(("avx", "amx", "profits"), [(False, False, False), (True, False, True), (False, True, True)])
def test_torch_says_whether_the_processor_has_bfloat16(
    monkeypatch: pytest.MonkeyPatch, avx: bool, amx: bool, profits: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
    assert devices.profits_from_bfloat16() is profits


def test_an_older_torch_that_cannot_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, name, raising=False)
    assert devices.profits_from_bfloat16() is False
