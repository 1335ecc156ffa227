"""System calls of the guard over files that fail, and processes that die at them.

`disk.py` makes all of them, and finds them in the modules `os`, `fcntl` and `shutil`. While a fault is injected it
finds them in a stand-in, so a call that is added to `disk.py` is part of every test here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal

from fenced.stores.files.guard import disk

Kind = Literal["dies", "fails", "fails from then on", "is interrupted"]
_ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EMFILE)
_PURE = {"fspath", "fsencode", "geteuid", "join", "split"}
_PART = 24
"""How many bytes the kernel writes at once, here. The head of a page has fewer, its body more."""


class Died(BaseException):
    """The process has died: every further system call raises this, too. Its descriptors are still to be closed."""


class Fault:
    """What happens at one system call. Calls are counted; nothing waits for the disk.

    A process that dies is played: a real one takes a hundred times as long, and does nothing else than to make no
    further system call.
    """

    def __init__(self, kind: Kind, at: int | str = 0) -> None:
        self.kind = kind
        self.at = at
        self.calls: list[str] = []

    @property
    def reached(self) -> bool:
        return len(self.calls) >= self.at if isinstance(self.at, int) else self.at in self.calls

    def __call__(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.calls.append(name)
        if self._is_now(name):
            if self.kind == "dies":
                raise Died
            if name == "close":
                call(*args)  # Linux closes it even if it reports an error
            if self.kind == "is interrupted":
                raise KeyboardInterrupt
            code = _ERRORS[len(self.calls) % len(_ERRORS)]
            raise OSError(code, f"{os.strerror(code)}, in a test of {name}")
        if name == "fsync":
            return None
        if name == "open":
            return call(args[0], args[1] & ~os.O_DSYNC, *args[2:], **kwargs)
        if name == "pwrite":
            return call(args[0], args[1][: max(_PART, len(args[1]) // 2)], args[2])
        return call(*args, **kwargs)

    def _is_now(self, name: str) -> bool:
        if isinstance(self.at, str):
            return name == self.at or (self.kind == "dies" and self.at in self.calls)
        count = len(self.calls)
        return count == self.at or (self.kind in ("dies", "fails from then on") and count > self.at > 0)


class Calls:
    """A module whose functions are system calls."""

    def __init__(self, module: types.ModuleType, fault: Fault) -> None:
        self._module = module
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if name == "path":
            return Calls(found, self._fault)
        if name in _PURE or not isinstance(found, types.FunctionType | types.BuiltinFunctionType):
            return found
        return lambda *args, **kwargs: self._fault(name, found, *args, **kwargs)


@contextlib.contextmanager
def injected(fault: Fault) -> Iterator[None]:
    before = {name: getattr(disk, name) for name in ("os", "fcntl", "shutil")}
    try:
        for module in (os, fcntl, shutil):
            setattr(disk, module.__name__, Calls(module, fault))
        yield
    finally:
        for name, module in before.items():
            setattr(disk, name, module)
