"""Keep code of the working directory from running.

`python -c` and `python -m` look for modules in the current directory first, and so does every process that is started
in this way. A folder of images may come from anywhere: a file `numpy.py` in it must not be imported.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_RUN = "import sys; sys.path[:] = sys.argv[2:]; import importlib; importlib.import_module(sys.argv[1]).main()"


def isolated_command(module: str) -> list[str]:
    """Return the command that calls `main` of a module in a Python process without the current directory.

    The process searches the directories of `sys.path` except the current one, and last the one that holds this package.
    """
    here = Path.cwd()
    paths = [path for path in sys.path if Path(path).is_absolute() and Path(path) != here]
    return [sys.executable, "-I", "-c", _RUN, module, *paths, str(Path(__file__).parents[2])]


def isolate_children() -> None:
    """Keep the current directory off the search path of all Python processes that this one starts from now on."""
    os.environ["PYTHONSAFEPATH"] = "1"
    if sys.version_info < (3, 11):  # which does not know the variable
        from multiprocessing import util

        flags = util._args_from_interpreter_flags
        util._args_from_interpreter_flags = lambda: [*flags(), "-I"]


@contextlib.contextmanager
def beside_interpreter() -> Iterator[None]:
    """Work in the folder of the Python interpreter for the time of the block.

    This is for libraries that hand the current directory on to their processes. The folder is on the search path of
    `gepc` in any case.
    """
    here = Path.cwd()
    os.chdir(Path(sys.executable).parent)
    try:
        yield
    finally:
        os.chdir(here)
