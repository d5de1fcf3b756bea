"""Do the tests test? Change the core one operator or number at a time and run the tests of the changed module.

    python benchmarks/mutants.py [--count 120] [--skip 0] [--all] [--only conformal/p_values] [--jobs 2]

A mutant is killed if a test fails. The sample is fixed: mutants are ordered by a hash of their text, so that it changes
only where the code does. Mutants that no test can kill, because the program stays the same, are listed with a reason
each in `mutants.yaml` and do not count. Exits with 1 if fewer than 95 % of the others are killed.

Why not mutmut or cosmic-ray: mutmut leaves out decorated functions, which are half of this code (properties, class
methods), and cosmic-ray starts an interpreter for every mutant, where importing torch takes longer than the tests. Here
the libraries are imported once, and each mutant is a fork of that process.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import hashlib
import importlib.abc
import importlib.util
import math
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = Path(__file__).with_suffix(".yaml")
LEAST = 0.95
# A mutant that takes this many times the CPU time of the unchanged module counts as killed, however busy the machine is
PATIENCE, LEAST_SECONDS, MOST_SECONDS = 5, 20, 600
WAITING = 3600  # seconds until one that only waits counts as killed

QUIETLY = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # these tests need no plugin, and loading all takes longer than they
TESTS = {
    "images/noise": ["tests/images/test_noise.py"],
    "methods/groups": ["tests/methods/test_groups.py"],
    "methods/pooling": ["tests/methods/test_pooling.py"],
    "methods/gepc": ["tests/methods/test_gepc.py", "tests/methods/test_inner.py", "tests/test_parity.py"],
    "methods/features": [
        "tests/methods/test_gepc_plus.py",
        "tests/methods/test_gepc.py",
        "tests/methods/test_inner.py",
        "tests/test_parity.py",
        "tests/backbones/test_latent.py",
    ],
    "lab/metrics": ["tests/lab/test_metrics.py", "tests/lab/test_localisation.py"],
    "calibration/scorer": ["tests/calibration/test_scorer.py"],
    "calibration/calibrators": ["tests/calibration/test_calibrators.py", "tests/calibration/test_calibrators_more.py"],
    "conformal/p_values": ["tests/conformal/test_p_values.py", "tests/conformal/test_reference.py"],
    "conformal/decision": ["tests/conformal/test_decision.py", "tests/conformal/test_control.py"],
    "conformal/monitor": ["tests/conformal/test_monitor.py"],
    "maps/drawing": ["tests/maps/test_drawing.py"],
}
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
WORDS = {"left": "right", "right": "left"}


@dataclass(frozen=True)
class Mutant:
    """One change: the module, the line it is on, that line's text, and the change in words."""

    module: str
    line: int
    text: str
    change: str
    place: int  # of the changed node among the nodes of the module

    @property
    def key(self) -> str:
        """How `mutants.yaml` refers to it; the same wherever in the file the line is."""
        return f"{self.module}: {self.text} # {self.change}"


def candidates(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that may be changed: no annotation, decorator, docstring, or error message."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_comment"):
            continue
        for node in value if isinstance(value, list) else [value]:
            skipped = (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)
            if not isinstance(node, ast.AST) or isinstance(node, skipped) or _is_no_behaviour(node):
                continue
            yield node
            yield from candidates(node)


def _is_no_behaviour(node: ast.AST) -> bool:
    """Types, and `zip(..., strict=True)`, which is an assertion."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return True
    # aliases such as `Array = npt.NDArray[...]`, and `X | Y` of types
    return isinstance(node, ast.Assign) and any(word in ast.unparse(node.value) for word in ("NDArray", "Callable["))


def changed(node: ast.AST) -> tuple[str, str] | None:
    """Change the node in place; its old and new text, or None where nothing of it is changed."""
    before = ast.unparse(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        node.ops[0] = COMPARISONS[type(node.ops[0])]()
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OPERATORS:
        node.op = OPERATORS[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        node.op = ast.UAdd() if isinstance(node.op, ast.USub) else _double_not(node)
    elif isinstance(node, ast.Constant):
        value: Any = node.value
        if isinstance(value, bool):
            node.value = not value
        elif isinstance(value, int):
            node.value = value + 1
        elif isinstance(value, float):
            node.value = 2.0 * value if value else 1.0
        elif value in WORDS:
            node.value = WORDS[value]
        else:
            return None
    else:
        return None
    return before, ast.unparse(node)


def _double_not(node: ast.UnaryOp) -> ast.unaryop:
    node.operand = ast.UnaryOp(ast.Not(), node.operand)
    return ast.Not()


def mutants_of(module: str) -> list[Mutant]:
    """Every mutant of a module, in the order of the file."""
    source = (ROOT / "src" / "gepc" / f"{module}.py").read_text(encoding="utf-8")
    lines, found = source.splitlines(), []
    for place, node in enumerate(candidates(ast.parse(source))):
        change = changed(copy.deepcopy(node))
        if change is not None and change[0] != change[1]:
            line = node.lineno  # type: ignore[attr-defined]
            found.append(Mutant(module, line, lines[line - 1].strip(), " -> ".join(change), place))
    return found


def mutated(mutant: Mutant) -> ast.Module:
    """The module with the change."""
    tree = ast.parse((ROOT / "src" / "gepc" / f"{mutant.module}.py").read_text(encoding="utf-8"))
    changed(list(candidates(tree))[mutant.place])
    return ast.fix_missing_locations(tree)


class Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives a mutant in place of its module."""

    def __init__(self, mutant: Mutant) -> None:
        self.name = f"gepc.{mutant.module.replace('/', '.')}"
        self.path = str(ROOT / "src" / "gepc" / f"{mutant.module}.py")
        self.code = compile(mutated(mutant), self.path, "exec")

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """The spec of the mutant, for its own name only."""
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def create_module(self, spec: object) -> None:
        """The default."""

    def exec_module(self, module: Any) -> None:
        """Run the changed code."""
        exec(self.code, module.__dict__)  # noqa: S102


def survives(mutant: Mutant | None, module: str, limit: int) -> tuple[bool, float]:
    """Whether all tests of the module pass, in a fork that may use `limit` seconds of CPU time, and how many it used.

    Without a mutant the module is as it is.
    """
    with tempfile.TemporaryDirectory() as folder:  # its own: in a shared one, runs at the same time disturb each other
        return _survives(mutant, module, limit, f"--basetemp={folder}/tests")


def _survives(mutant: Mutant | None, module: str, limit: int, folder: str) -> tuple[bool, float]:
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
            if mutant is not None:
                sys.meta_path.insert(0, Loader(mutant))
            import pytest

            os.chdir(ROOT)
            code = int(pytest.main([*QUIETLY, folder, *TESTS[module]]))
        os._exit(code)
    ends = time.monotonic() + WAITING
    while time.monotonic() < ends:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0, usage.ru_utime + usage.ru_stime
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False, float(limit)


def main() -> int:
    """Print the survivors and the share of mutants that were killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--count", type=int, default=120, help="size of the sample")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first mutants of the order: a fresh sample")
    parser.add_argument("--all", action="store_true", help="every mutant instead of a sample")
    parser.add_argument("--only", choices=sorted(TESTS), help="mutants of one module")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many mutants to run at once")
    options = parser.parse_args()
    modules = [options.only] if options.only else sorted(TESTS)
    equivalent = yaml.safe_load(EQUIVALENT.read_text(encoding="utf-8")) or {}
    everyone = [mutant for module in modules for mutant in mutants_of(module)]
    unknown = equivalent.keys() - {mutant.key for module in TESTS for mutant in mutants_of(module)}
    for key in sorted(unknown):
        print(f"no longer a mutant, remove it from {EQUIVALENT.name}: {key}")
    living = [mutant for mutant in everyone if mutant.key not in equivalent]
    living.sort(key=lambda mutant: hashlib.sha256(mutant.key.encode()).digest())
    sample = living if options.all else living[options.skip : options.skip + options.count]
    for name in (
        "torch",
        "scipy.stats",
        "sklearn.covariance",
        "diffusers.models.unets.unet_2d",
        "hypothesis",
        "pytest",
        "PIL.Image",
    ):
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    with ThreadPoolExecutor(options.jobs) as pool:
        unchanged = dict(zip(modules, pool.map(lambda m: survives(None, m, MOST_SECONDS), modules), strict=True))
        broken = [module for module, (passed, _) in unchanged.items() if not passed]
        if broken:
            print(f"the tests of {', '.join(broken)} fail without any change")
            return 2
        limits = {m: max(LEAST_SECONDS, math.ceil(PATIENCE * seconds)) for m, (_, seconds) in unchanged.items()}
        survivors = []
        verdicts = pool.map(lambda mutant: survives(mutant, mutant.module, limits[mutant.module])[0], sample)
        for mutant, alive in zip(sample, verdicts, strict=True):
            if alive:
                survivors.append(mutant)
                place = f"src/gepc/{mutant.module}.py:{mutant.line}"
                print(f"survived  {place}: {mutant.text}\n          {mutant.change}", flush=True)
    killed = len(sample) - len(survivors)
    print(f"{killed} of {len(sample)} mutants killed ({killed / max(1, len(sample)):.1%}); {len(everyone)} in all, "
          f"{len(everyone) - len(living)} of them equivalent")  # fmt: skip
    return 0 if killed >= LEAST * len(sample) and not unknown else 1


if __name__ == "__main__":
    sys.exit(main())
