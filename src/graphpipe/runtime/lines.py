"""Lines of JSON over a socket, as watchdogs talk."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

# A table of places is far shorter.
MAX_LINE_BYTES = 1 << 26


class Lines:
    """Lines of JSON over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.is_open = True
        self.max_line_bytes = MAX_LINE_BYTES
        self._buffer = b""
        connection.settimeout(1.0)

    def send(self, **message: Any) -> None:
        """Send one object; a broken connection is found by `receive`."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.is_open = False

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield what has come. Call it when the socket is readable; `is_open` is False at the end."""
        try:
            data = self.socket.recv(1 << 20)
        except TimeoutError:
            return
        except OSError:
            data = b""
        if not data:
            self.is_open = False
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        try:
            found: list[Any] = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            found = [None]
        if len(self._buffer) > self.max_line_bytes or not all(isinstance(message, dict) for message in found):
            # Whoever is there does not speak our language: a port scanner, say. It must not end the job.
            self._buffer = b""
            self.is_open = False
            return
        yield from found
