"""What a command line does with an error."""

from __future__ import annotations

import pytest

from dear_serve.command import run_command
from dear_serve.errors import CheckFailedError, ConfigError, DearError, MissingDependencyError

CASES = [
    (ConfigError("beta is 2; between 0 and 1"), 2, "error: beta is 2; between 0 and 1"),
    (CheckFailedError("parity"), 1, "error: parity"),
    (MissingDependencyError("pip install x"), 3, "error: pip install x"),
    (DearError("stopped"), 1, "error: stopped"),
    (
        FileNotFoundError(2, "No such file or directory", "a.png"),
        2,
        "error: a.png cannot be used: No such file or directory",
    ),
    (ValueError("odd"), 1, "error: ValueError: odd (--debug shows where)"),
    (KeyboardInterrupt(), 130, "interrupted"),
]


@pytest.mark.parametrize(("error", "code", "line"), CASES, ids=lambda v: type(v).__name__)
def test_one_line_and_the_status_of_the_contract(error, code, line, capsys):
    def command() -> int:
        raise error

    assert run_command(command, debug=False) == code
    assert capsys.readouterr().err == line + "\n"


def test_status_of_a_command_that_ends():
    assert run_command(lambda: None, debug=False) == 0
    assert run_command(lambda: 1, debug=False) == 1


def test_debug_lets_tracebacks_through():
    def command() -> int:
        raise ValueError("odd")

    with pytest.raises(ValueError, match="odd"):
        run_command(command, debug=True)
