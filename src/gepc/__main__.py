"""`python -m gepc` is `gepc`."""

import os
import sys

if sys.path[0] == os.getcwd():  # noqa: PTH109 (pathlib is not imported yet); `-m` put it there
    del sys.path[0]

from gepc.cli import main

main()
