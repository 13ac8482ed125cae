"""The command line, `moe-serve`: an admin client, and the way into `bootstrap`, `demo` and replay.

Responsible for arguments, text for people and exit codes. Must never hold a rule of placement, nor
talk to a running service other than through its admin port and `bootstrap`. Ray is imported only
inside the commands that start or end a service.
"""

import os
import sys

PROGRAM = "moe-serve"
COMPLETE_VARIABLE = "_MOE_SERVE_COMPLETE"
"""Set by the scripts of `completion` when a shell asks what TAB could mean."""
INTERRUPTED = 130
"""`ExitCode.INTERRUPTED`, which is loaded with the commands."""


def main() -> None:
    """Run the command line of this process and exit with its code."""
    _fill_closed_streams()
    try:
        from moe_serve.cli.app import app
    except KeyboardInterrupt:
        # Loading takes a second, and the commands' own handling is not there yet.
        raise SystemExit(INTERRUPTED) from None
    if COMPLETE_VARIABLE in os.environ:
        from moe_serve.cli.completions import offer_completions

        offer_completions()
    app(prog_name=PROGRAM)


def _fill_closed_streams() -> None:
    """Where a shell closed one (`>&-`), Python has None. What is written there is gone, and the
    number of the stream is taken: no file or connection opened later gets it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # Open as long as the process lives.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
