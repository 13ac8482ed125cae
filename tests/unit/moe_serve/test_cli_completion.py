"""`moe-serve completion`, and what help says of exit codes."""

import pytest
from typer.testing import CliRunner

from moe_serve.cli.app import app


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_names_the_program_and_what_it_asks_by(shell: str) -> None:
    result = CliRunner().invoke(app, ["completion", shell])
    assert (result.exit_code, result.stderr) == (0, "")
    assert "_MOE_SERVE_COMPLETE=complete_" + shell in result.stdout
    assert "moe-serve" in result.stdout


@pytest.mark.parametrize("shell", ["tcsh", ""])
def test_another_shell_is_exit_2(shell: str) -> None:
    assert CliRunner().invoke(app, ["completion", shell]).exit_code == 2


def test_no_option_writes_into_files_of_the_user() -> None:
    shown = CliRunner().invoke(app, ["--help"]).stdout
    assert "install-completion" not in shown
    assert "completion" in shown


@pytest.mark.parametrize("command", [[], ["status"], ["bench"], ["completion"]])
def test_help_ends_with_the_exit_codes(command: list[str]) -> None:
    shown = " ".join(CliRunner().invoke(app, [*command, "--help"]).stdout.split())
    assert "Exit codes: 0 done; 1 refused or failed" in shown
    assert shown.endswith("130 Ctrl-C.")
