"""What every command does with errors, and its exit statuses."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from glm5_next.launchers.failures import RunFailed

STOPPED = 130  # of a run that was stopped and can be resumed


@contextmanager
def one_message_on_error() -> Iterator[None]:
    """What a user can get wrong is a ValueError, and a run keeps its own traceback: the message is all they need."""
    try:
        yield
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except RunFailed as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(STOPPED)
