"""Waking waiters of other processes: datagram sockets in a folder beside the database.

A datagram is a hint: it is sent after the commit, and nobody waits for it. A socket's path is limited to 108 bytes,
so it is addressed through a descriptor of its folder (`/proc/self/fd/N/name`): a long path does not matter.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import threading
from pathlib import Path

from fenced.errors import Misconfigured, Unavailable
from fenced.net.filesystem import share

_DATAGRAM_MAX = 64
_SWEEP_MAX = 64


class Wakes:
    """This client's socket, and sending to other clients' sockets."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._folder = database.with_name(database.name + "-wake")
        # For sockets and folder, which threads make at first use and `close` takes away. It may be taken again: `_bind`
        # sends under it.
        self._lock = threading.RLock()
        self._folder_fd = -1
        self._receiver: socket.socket | None = None
        self._sender: socket.socket | None = None
        self._closed = False
        self.address = ""

    def listen(self) -> socket.socket:
        """Bind at first use: when the first attempt of this client waits."""
        with self._lock:
            if self._closed:  # a listener of another thread may call this just after `close`
                raise Unavailable(f"the client of {self._database} was closed: nothing listens for wake-ups")
            if self._receiver is None:
                try:
                    self._bind()
                except PermissionError as error:
                    raise Misconfigured(f"{self._folder} must be writable: {error}") from error
                except OSError as error:
                    raise Unavailable(f"cannot listen for wake-ups in {self._folder}: {error}") from error
            assert self._receiver is not None
            return self._receiver

    def _bind(self) -> None:
        self._open_folder()
        receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        address = secrets.token_hex(8)
        try:
            receiver.bind(f"/proc/self/fd/{self._folder_fd}/{address}")
            share(self._folder / address, self._database, self._mode())
        except BaseException:
            receiver.close()
            raise
        self._receiver, self.address = receiver, address
        self._sweep()

    def _sweep(self) -> None:
        """Remove sockets whose processes are gone; a few each time a client binds."""
        for entry in itertools.islice(os.listdir(self._folder_fd), _SWEEP_MAX):
            if entry != self.address:
                self._send_to(entry, "")

    def _open_folder(self) -> None:
        if self._folder_fd < 0:
            if not self._folder.is_dir():
                self._folder.mkdir(exist_ok=True)
                setgid = os.stat(self._folder).st_mode & 0o2000
                share(self._folder, self._database, self._mode() | self._mode() >> 2 & 0o111 | setgid)
            self._folder_fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def _mode(self) -> int:
        return os.stat(self._database).st_mode & 0o666

    def received(self) -> list[str]:
        """The public ids that have arrived, without waiting."""
        # Read once: `close` may take it away meanwhile, and a closed one raises OSError.
        receiver = self._receiver
        received: list[str] = []
        while receiver is not None and len(received) < 1000:
            try:
                received.append(receiver.recv(_DATAGRAM_MAX).decode("ascii", "replace"))
            except OSError:
                break
        return received

    def send(self, wakes: list[tuple[str, str]]) -> None:
        """Notify each (socket, public id). If that fails or the socket's queue is full, the waiter polls anyway."""
        for address, public in wakes:
            if address:
                self._send_to(address, public)

    def _send_to(self, address: str, public: str) -> None:
        try:
            with self._lock:
                if self._closed:
                    return
                self._open_folder()
                if self._sender is None:
                    self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
                sender, folder = self._sender, self._folder_fd
            # Not under the lock: it does not block, and if `close` has been faster it fails, or finds no such socket.
            sender.sendto(public.encode(), f"/proc/self/fd/{folder}/{address}")
        except ConnectionRefusedError:
            with contextlib.suppress(OSError):  # its process is gone
                os.unlink(address, dir_fd=folder)
        except OSError:
            return

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._receiver is not None:
                self._receiver.close()
                with contextlib.suppress(OSError):
                    os.unlink(self.address, dir_fd=self._folder_fd)
            if self._sender is not None:
                self._sender.close()
            if self._folder_fd >= 0:
                os.close(self._folder_fd)
            self._receiver, self._sender, self._folder_fd, self.address = None, None, -1, ""

    def forked(self) -> None:
        """The child must not read the parent's socket, nor unlink it."""
        self._lock = threading.RLock()  # a new one: a thread that the child does not have may hold the other
        for inherited in (self._receiver, self._sender):
            if inherited is not None:
                inherited.close()
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
        self._receiver, self._sender, self._folder_fd, self.address = None, None, -1, ""
