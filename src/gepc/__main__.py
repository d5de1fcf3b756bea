"""`python -m gepc` is `gepc`."""

from gepc.cli import main

main()
