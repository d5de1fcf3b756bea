"""The commands of the laboratory, which `gepc` finds through the entry point group `gepc.commands`."""

import typer

PANELS = {
    "Get started": ("demo", "selfcheck"),
    "Backbones": ("train",),
    "Evaluate": ("bench", "ablate", "reproduce"),
}


def add_commands(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    from gepc.lab.cli import evaluate, train
    from gepc.lab.cli.data import data
    from gepc.lab.cli.radar import sar
    from gepc.lab.cli.symmetries import symmetries

    for panel, names in PANELS.items():
        for name in names:
            command = getattr(train if name == "train" else evaluate, name)
            app.command(name=name, rich_help_panel=panel)(command)
    app.command(rich_help_panel="Evaluate")(symmetries)
    for group in (data, sar):
        app.add_typer(group, rich_help_panel="Evaluate")
