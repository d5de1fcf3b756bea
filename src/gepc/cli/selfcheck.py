"""`gepc selfcheck`: the closed forms on this machine."""

from __future__ import annotations

import typer

from gepc.cli.app import app, say


@app.command()
def selfcheck() -> None:
    """Run the theory's closed forms on this machine and print pass or fail.

    Example: `gepc selfcheck`
    """
    from gepc.theory.selfcheck import run_checks

    checks = run_checks()
    for check in checks:
        say(f"{'pass' if check.passed else 'FAIL'}  {check.name}: {check.found:.12g}, expected {check.expected:.12g}")
    failed = sum(not check.passed for check in checks)
    say(f"{len(checks) - failed} passed, {failed} failed")
    if failed:
        raise typer.Exit(1)
