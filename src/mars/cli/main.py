"""The `mars` command: its subcommands, and the one place where errors become messages."""

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mars.cli import bench, chat, data, demo, distill, generate, models, train
from mars.errors import UserError

INTERRUPTED = 130  # what shells report for Ctrl-C


class Commands(TyperGroup):
    """A group of commands whose foreseeable errors are one line on stderr, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; exit with 2 if the user can fix what went wrong."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a broken pipe shows here, not when Python shuts down
        except BrokenPipeError:
            # The reader (`| head`) has what it wants; nothing may be flushed to it at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except (UserError, OSError) as error:  # OSError: disk full, no permission, ...
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        return result


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from mars import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Teach an ordinary language model to predict several tokens at once, and use it.

    Wherever a model is asked for, give a hub id or a local folder; without one, a small default
    model is fetched, and drafts with the adapter that comes with this package.
    """


# The arguments of these go to the parser of the training options as they are.
_RAW: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}

app.command()(models.pull)
app.add_typer(data.app, name="data")
app.command()(distill.distill)
app.command(context_settings=_RAW)(train.sft)
app.command(context_settings=_RAW)(train.train)
app.command()(models.merge)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(bench.bench)
app.command()(demo.demo)


def run() -> None:
    """Run the command line."""
    app(prog_name="mars")
