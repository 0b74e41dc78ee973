"""What the scripts of this folder have in common as commands."""

from collections.abc import Callable
from typing import Any, TypeVar

import tyro
from rich.console import Console

Options = TypeVar("Options")


def run_command(options: type[Options], run: Callable[[Options, Console], Any]) -> int:
    """Read the command line and run; bad input ends with a line that says what is wrong, and with exit status 2."""
    console = Console()
    try:
        run(tyro.cli(options), console)
    except (ValueError, ImportError) as error:
        console.print(str(error), style="bold red", markup=False)
        return 2
    return 0
