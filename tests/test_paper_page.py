"""Every function, test and command that the page on the paper names exists, and it names all items of the paper."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest
from test_docs import check_command

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "paper.md").read_text()
WORDS = re.findall(r"`([^`\n]+)`", PAGE)
LABELS = [
    "def-gepc",
    "prop-bounds",
    "prop-cross-bounds",
    "lem:inv_eq",
    "lem:app-eps-score",
    "lem:app-tweedie-add",
    "lem:app-tweedie-ddpm",
    "lem:app-postcov-hess",
    "lem:app-lip-denoiser",
    "ass:app-dir-contract",
    "lem:app-dir-score-star",
    "lem:app-dir-score-theta",
    "alg:tselect",
    "tab:main_32",
    "tab:tselect_kept_allpairs",
    "tab:tselect_sweep_allpairs",
    "tab:tselect_sweep_rep",
    "tab:per_g_allpairs",
    "tab:calib_allpairs",
    "tab:feat_allpairs",
    "tab:runtime_rep",
    "tab:sar_ood_metrics",
    "fig:gepc_overview",
    "fig:ablation_c10_svhn",
    "fig:hists_svhn_c100",
    "fig:sar_gepc_main",
    "fig:sar_qual_appendix",
    "eq-gepc-rt",
    "eq-gepc",
    "eq-gauss-shift",
    "eq:delta-def",
    "eq:symbreak-functional",
    "eq-prac-gepc-t",
    "eq-prac-gepc",
]


@pytest.mark.parametrize("label", LABELS)
def test_every_item_of_the_paper_is_on_the_page(label: str) -> None:
    assert label in WORDS


@pytest.mark.parametrize("name", sorted({word for word in WORDS if re.fullmatch(r"gepc(\.\w+)+", word)}))
def test_every_function_exists(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", sorted({word for word in WORDS if word.startswith("tests/")}))
def test_every_test_exists(name: str) -> None:
    path, _, test = name.partition("::")
    names = {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert not test or test in names


@pytest.mark.parametrize("line", sorted({word for word in WORDS if word.startswith("gepc ")}))
def test_every_command_exists(line: str) -> None:
    check_command("paper.md", line)
