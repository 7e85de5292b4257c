# SPDX-License-Identifier: Apache-2.0
"""A TCPStore whose clients go through a proxy of this process, which can fall silent or hang up as a server may."""

from __future__ import annotations

import contextlib
import socket
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["Proxy"]


class Proxy:
    """A store's server, and what stands between it and its clients."""

    def __init__(self) -> None:
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._goes_on = threading.Event()
        self._goes_on.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def client(self, timeout_s: float = 30.0) -> Any:
        return dist.TCPStore(
            "127.0.0.1", self.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )

    def stop(self) -> None:
        """From now on, answer nothing, as a process that was sent SIGSTOP: the kernel still takes what is sent."""
        self._goes_on.clear()

    def end(self) -> None:
        """Close all connections, as the kernel does for a process that has died."""
        self._goes_on.set()
        for each in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self.server.port))
                self._sockets += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._goes_on.wait()
                sink.sendall(data)
