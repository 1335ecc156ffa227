"""Log lines of commands that run until they are stopped."""

from __future__ import annotations

import logging

from fenced.cli.output import complain


class _LineHandler(logging.Handler):
    """One line for each record, as for an error."""

    def emit(self, record: logging.LogRecord) -> None:
        kind = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        complain(kind + record.getMessage())


def log_to_stderr() -> None:
    """Show what `fenced.service` and `fenced.proxy` log, for a command that runs until it is stopped."""
    log = logging.getLogger("fenced")
    if not log.handlers:
        log.addHandler(_LineHandler())
        log.setLevel(logging.INFO)
