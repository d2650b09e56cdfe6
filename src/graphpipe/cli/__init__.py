"""The command line: ``graphpipe plan | show | simulate | verify | train``. The only part that prints.

Each command is one module. `main` turns a `GraphPipeError` into one line and exit code 1.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback

import click

from graphpipe import __version__
from graphpipe.cli.launch import is_worker
from graphpipe.errors import GraphPipeError
from graphpipe.runtime.failure_report import report_failure

_COMMANDS = {
    "plan": "find stages, devices, micro-batch size and schedule for a model",
    "show": "print and draw a strategy, or the branches of a model",
    "simulate": "predict the timeline and the memory of a strategy",
    "verify": "compare one step with a single process: the loss and every gradient",
    "train": "train a model by a strategy on every device",
}


class _LazyGroup(click.Group):
    """Imports a command's module when it is used: `show` need not wait for torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = importlib.import_module(f"graphpipe.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="graphpipe")
def application() -> None:
    """Train PyTorch models over many devices by graph pipeline parallelism."""


def main() -> None:
    """Run the command line and exit: 0 when all is well, 1 for an error, 2 for a wrong call."""
    code: int
    message = ""
    try:
        result = application(standalone_mode=False)
        code = result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        if not is_worker():  # The launcher says it once.
            print("stopped", file=sys.stderr)
        code = 130
    except GraphPipeError as error:
        message, code = str(error), 1
    except BrokenPipeError:
        code = 0
    except Exception:
        # A fault of the user's code or of ours, told in full; in a worker often only the echo of another's end.
        message, code = traceback.format_exc().strip(), 1
    if message:
        report_failure(message, int(os.environ.get("RANK", "0")) if is_worker() else None)
    if is_worker():
        if "graphpipe.runtime.watchdog" in sys.modules:
            sys.modules["graphpipe.runtime.watchdog"].leave_job(message.splitlines()[-1] if message else None)
        # Threads of torch.distributed may still wait for other processes; they would keep this one alive.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
