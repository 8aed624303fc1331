"""Serves an aiohttp application in a thread, with an address and limits on connections and on silence."""

import asyncio
import logging
import socket

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from areal_bus.process.loop_thread import LoopThread

HOST = "127.0.0.1"
BACKLOG = 128
SILENT_S = 30.0
DISCARD_S = 10.0  # longest time that the rest of a rejected body is read, so that its client receives the error
CLOSE_S = 1.0  # longest wait for requests in progress at close
# errors of our handlers; a malformed request is answered only
LOG = logging.getLogger(__name__)
LOG.addFilter(lambda line: line.exc_info is None or not isinstance(line.exc_info[1], HttpProcessingError))


class WebServer:
    """Serves until it is closed."""

    def __init__(
        self,
        app: web.Application,
        *,
        name: str,
        n_connections: int,
        address: tuple[str, int] = (HOST, 0),
        silent_s: float = SILENT_S,
        shared_port: int | None = None,
    ) -> None:
        """`address`: port 0 takes a free one. `name`: of the thread. `shared_port`: a second port, on which other
        processes listen, too: each connection goes to one of them. Raises OSError when a port is taken.
        """
        self._sockets = [socket.create_server(address, backlog=BACKLOG)]
        self.port: int = self._sockets[0].getsockname()[1]
        if shared_port is not None:
            self._sockets.append(socket.create_server((address[0], shared_port), backlog=BACKLOG, reuse_port=True))
        self._n_connections = n_connections
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=LOG,
            handler_cancellation=True,  # a client that disconnects ends its request
            keepalive_timeout=silent_s,  # also from the connection to the end of the first request's headers
            lingering_time=DISCARD_S,
            shutdown_timeout=CLOSE_S,
        )
        self.thread = LoopThread(name)
        self.thread.run(self._start()).result()

    def close(self) -> None:
        self.thread.run(self._runner.cleanup()).result()
        self.thread.close()
        for one in self._sockets:
            one.close()

    async def _start(self) -> None:
        await self._runner.setup()
        for one in self._sockets:
            await asyncio.get_running_loop().create_server(self._protocol, sock=one, backlog=BACKLOG)

    def _protocol(self) -> asyncio.Protocol:
        """That of a new connection."""
        server = self._runner.server
        if server is None or len(server.connections) >= self._n_connections:
            return Refusal()
        return server()


class Refusal(asyncio.Protocol):
    """Closes a connection over the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
