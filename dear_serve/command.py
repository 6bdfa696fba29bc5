"""What every command line does with an error: one line that helps, the exit status of the contract, no traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from dear_serve.errors import DearError

__all__ = ["INTERRUPTED", "run_command"]

INTERRUPTED = 130


def run_command(command: Callable[[], int | None], *, debug: bool) -> int:
    """Run `command` and turn what it raises into one line on stderr and an exit status.

    Args:
        command: returns an exit status; None is 0.
        debug: let every traceback through.

    Returns:
        The command's own status; that of a `DearError`; 2 for a file or folder that cannot be used; 130 for Ctrl-C;
        1 for anything that was not foreseen.
    """
    try:
        return command() or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if debug:
            raise
        print(f"error: {_line(error)}", file=sys.stderr)
        if isinstance(error, DearError):
            return error.exit_code
        return 2 if isinstance(error, OSError) else 1


def _line(error: Exception) -> str:
    if isinstance(error, DearError):
        return error.message
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'a file'} cannot be used: {error.strerror}"
    return f"{type(error).__name__}: {error} (--debug shows where)"
