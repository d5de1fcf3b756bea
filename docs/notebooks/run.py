"""Run the notebooks of this folder and store their outputs.

    python docs/notebooks/run.py [--check] [NAME ...]

Without a name all of them are run. With --check nothing is written: a notebook that raises, or whose tables differ
from the stored ones, is an error.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def texts(notebook: nbformat.NotebookNode) -> list[str]:
    """What each cell prints and shows as text, in one piece; pictures and their sizes are left out."""
    return [
        "".join(
            str(output.get("text") or output.get("data", {}).get("text/plain", ""))
            for output in cell.outputs
            if "image/png" not in output.get("data", {})
        )
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def main() -> int:
    """0 if all notebooks run, and with --check give what they gave before."""
    failed = 0
    names = [argument for argument in sys.argv[1:] if argument != "--check"]
    for path in [HERE / f"{name}.ipynb" for name in names] or sorted(HERE.glob("*.ipynb")):
        started = time.perf_counter()
        stored = nbformat.read(path, 4)
        fresh = nbformat.from_dict(stored)
        NotebookClient(fresh, timeout=900, kernel_name="python3", record_timing=False).execute()
        if "--check" not in sys.argv:
            fresh.metadata.pop("widgets", None)
            fresh.metadata["language_info"] = {"name": "python"}
            nbformat.write(fresh, path)
        elif texts(fresh) != texts(stored):
            failed += 1
            print(f"{path.name} gives other results than the stored ones; run {Path(__file__).name} and look at them")
        else:
            print(f"{path.name}: as stored, {time.perf_counter() - started:.0f} s")
    return failed


if __name__ == "__main__":
    sys.exit(main())
