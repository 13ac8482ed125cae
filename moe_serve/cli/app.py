"""The application: its commands, its global options, and the one place where errors become codes.

Responsible for wiring. Commands are plain functions in `commands`, one module a topic. Called by
`main`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from moe_serve import __version__
from moe_serve.cli.commands.bench import bench
from moe_serve.cli.commands.completion import completion
from moe_serve.cli.commands.demo import demo
from moe_serve.cli.commands.doctor import doctor
from moe_serve.cli.commands.events import events
from moe_serve.cli.commands.explain import explain
from moe_serve.cli.commands.fleet import add_rank, remove_rank, roll
from moe_serve.cli.commands.heat import heat
from moe_serve.cli.commands.layout import export, import_file, rollback
from moe_serve.cli.commands.metrics import metrics_app
from moe_serve.cli.commands.plan import apply, plan
from moe_serve.cli.commands.replay import replay
from moe_serve.cli.commands.screen import screen
from moe_serve.cli.commands.service import down, up, validate
from moe_serve.cli.commands.status import status
from moe_serve.cli.commands.steer import budget, drain, pause, resume, undrain
from moe_serve.cli.commands.top import top
from moe_serve.cli.exits import EPILOG, ExitCode, error_lines, exit_code_of
from moe_serve.cli.options import Reach
from moe_serve.cli.output import Output
from moe_serve.config import ConfigInvalid
from moe_serve.errors import MoeServeError


class _Commands(TyperGroup):
    """The group of all commands: a typed error of any of them is text and an exit code, never a
    traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (MoeServeError, ConfigInvalid) as error:
            output = Output()
            for line in error_lines(error):
                output.error(line)
            raise typer.Exit(exit_code_of(error)) from error
        except UnicodeEncodeError as error:
            Output().error(f"error: an argument is not UTF-8: {error.object!r}")
            raise typer.Exit(ExitCode.USAGE) from error
        except KeyboardInterrupt:
            raise typer.Exit(ExitCode.INTERRUPTED) from None


app = typer.Typer(
    name="moe-serve",
    cls=_Commands,
    help="Serve the experts of a Mixture-of-Experts model from Ray, and see and steer where they "
    "are.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # its tracebacks show local variables, tokens among them
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        Output().out.print(f"moe-serve {__version__}")
        raise typer.Exit(ExitCode.OK)


@app.callback()
def global_options(
    ctx: typer.Context,
    token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="MOE_SERVE_TOKEN_FILE",
            help="File with lines of `role token`, where the service asks for a token.",
        ),
    ] = None,
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            envvar="MOE_SERVE_TLS_CA", help="PEM root to check the service's TLS certificate with."
        ),
    ] = None,
    _version_asked: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Options of every command that speaks to a running service."""
    given = ctx.obj if isinstance(ctx.obj, Reach) else Reach()
    ctx.obj = dataclasses.replace(given, token_file=token_file, tls_ca=tls_ca)


for _command in (
    demo,
    validate,
    up,
    down,
    status,
    top,
    heat,
    plan,
    apply,
    rollback,
    export,
    pause,
    resume,
    drain,
    undrain,
    budget,
    add_rank,
    remove_rank,
    roll,
    events,
    explain,
    replay,
    screen,
    bench,
    doctor,
    completion,
):
    app.command(epilog=EPILOG)(_command)
app.add_typer(metrics_app, name="metrics")
app.command("import", epilog=EPILOG)(import_file)
