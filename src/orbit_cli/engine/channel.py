"""Length-prefixed pickles over one socket pair: how the trainer's process and the engine's process talk.

Both ends are ours and of one version; nothing else can reach the socket (an inherited file descriptor), so pickle is
safe here. Left out: who reads when (process.py on our side, host.py on the other).
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from typing import Any

_HEADER = struct.Struct("!Q")


class Channel:
    """One end. `send` may be called from any thread; `receive` from one."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Raises OSError when the other end is gone."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._sending:
            self.connection.sendall(_HEADER.pack(len(data)))
            self.connection.sendall(data)

    def receive(self) -> Any:
        """The next message. Raises EOFError when the other end is gone."""
        (size,) = _HEADER.unpack(self._exactly(_HEADER.size))
        return pickle.loads(self._exactly(size))

    def close(self) -> None:
        self.connection.close()

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            try:
                count = self.connection.recv_into(view[done:])
            except ConnectionError:
                count = 0
            if not count:
                raise EOFError("the other end of the channel is gone")
            done += count
        return data
