"""The Typer application object, to which `main` adds the commands."""

from __future__ import annotations

import typer

from bitimely_core import __version__

app = typer.Typer(
    name="bitimely",
    help="Representations of clinical time series: raw files to a Parquet cache, to tokens, "
    "to models, to scores and reports.\n\nStart with: bitimely demo",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def show_version(value: bool) -> None:
    """`--version`."""
    if value:
        typer.echo(f"bitimely {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: bool = typer.Option(
        False, "--version", callback=show_version, is_eager=True, help="Print the version and stop."
    ),
) -> None:
    """Representations of clinical time series: raw files to a Parquet cache, to tokens, to models,
    to scores and reports.

    Start with: bitimely demo
    """
