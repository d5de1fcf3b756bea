"""The commands of the laboratory, which `gepc` finds through the entry point group `gepc.commands`."""

import typer


def add_commands(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    from gepc.lab.cli.evaluate import ablate, bench, data, demo, reproduce, selfcheck, symmetries
    from gepc.lab.cli.radar import sar
    from gepc.lab.cli.train import train

    panels = {
        "Get started": (demo, selfcheck),
        "Backbones": (train,),
        "Evaluate": (bench, ablate, reproduce, symmetries),
    }
    for panel, commands in panels.items():
        for command in commands:
            app.command(rich_help_panel=panel)(command)
    for group in (data, sar):
        app.add_typer(group, rich_help_panel="Evaluate")
