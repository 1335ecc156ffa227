"""The pulse of an event loop: another thread asks it for a sign of life, and reads which line its thread is at."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

_LIBRARY = os.path.dirname(os.__file__) + os.sep
_OURS = str(Path(__file__).parents[1]) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


class LoopPulse:
    """Made in the thread of a running event loop. Other threads call its methods."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()

    def ask(self, answer: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # closed just now: `over` says so next time
            self._loop.call_soon_threadsafe(answer)

    def over(self) -> bool:
        return self._loop.is_closed()

    def where(self) -> str:
        """The innermost line of the program's own code: neither the standard library, nor packages, nor ours.

        If there is none, for example because the program is an installed package, that of any code but Python's.
        """
        frame = sys._current_frames().get(self._thread)
        lines = [] if frame is None else list(_callers(frame))
        for kinds in (("program",), ("program", "package")):
            for at in lines:
                if _kind(at.f_code.co_filename) in kinds:
                    return f"{os.path.basename(at.f_code.co_filename)}:{at.f_lineno} {at.f_code.co_name}()"
        return ""


def _kind(file: str) -> str:
    if file.startswith((_OURS, "<frozen")):
        return "ours"
    if any(part in file for part in _INSTALLED):
        return "package"
    return "library" if file.startswith(_LIBRARY) else "program"


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """This frame and those that called it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back
