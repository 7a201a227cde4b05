"""A token that both jobs of a sync have to know before either reads or writes the other's store.

torch's TCPStore cannot authenticate. With a token it listens on the loopback interface alone, behind a front at the sender's
address. The front sends a random challenge, and passes on what comes over a connection only once its other end has answered with
an HMAC-SHA256 of the challenge under the token; it then proves in the same way that it knows the token. Nothing is encrypted:
who can read the network reads the weights, and who can change what is on it can take over a connection.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import hmac
import ipaddress
import os
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from epload.core.log import logger
from epload.errors import LoadError

ENVIRONMENT = "EPLOAD_SYNC_TOKEN"
_BANNER = b"epload sync 1 \n"
"""The first bytes of a front."""
_NONCE_BYTES, _DIGEST_BYTES = 32, 32
_HANDSHAKE_SECONDS = 10.0
"""Maximum seconds until a connection is authenticated."""
_BACKLOG, _MAX_UNAUTHENTICATED = 1024, 256
"""Connections that wait to be accepted, and those that are accepted and not authenticated yet."""
_CHUNK_BYTES = 1 << 16
_PORT_SECONDS = 3.0
"""Maximum seconds to wait for a port that is in use."""
LOOPBACK = "127.0.0.1"
_tunnels: dict[tuple[str, int, str, str], Relay] = {}
_lock = threading.Lock()
Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Pipe]]


def resolve_token(token: str | None) -> str:
    """Returns the token, by default that of the environment; empty for none. Raises TypeError."""
    if token is not None and not isinstance(token, str):
        raise TypeError(f"expected token to be a str, got a {type(token).__name__}")
    return os.environ.get(ENVIRONMENT, "") if token is None else token


def _digest(token: str, side: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(token.encode(), side + first + second, "sha256")


def authenticate(connection: socket.socket, token: str, where: str) -> None:
    """Answers the challenge of a front, and has it prove that it knows the token.

    Raises:
        LoadError: there is no front at the other end, or it has another token.
        OSError: the connection is lost.
    """
    connection.settimeout(_HANDSHAKE_SECONDS)
    try:
        greeting = _receive(connection, len(_BANNER) + _NONCE_BYTES)
        if not greeting:
            raise ConnectionError("the sender has closed the connection")
    except TimeoutError:
        greeting = b""
    if not greeting.startswith(_BANNER):
        raise LoadError(
            f"the sender at {where} asks for no token, but this job has one: pass it to the WeightSender, too, or unset "
            f"{ENVIRONMENT} here"
        )
    challenge, nonce = greeting[len(_BANNER) :], secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(nonce + _digest(token, b"client", challenge, nonce))
    proof = _receive(connection, _DIGEST_BYTES)
    if len(proof) < _DIGEST_BYTES:
        raise ConnectionError("the sender has closed the connection")
    if not hmac.compare_digest(proof, _digest(token, b"server", nonce, challenge)):
        raise LoadError(f"the sender at {where} has another token; pass the same one, or set {ENVIRONMENT} alike, in both jobs")
    connection.settimeout(None)


def asks_for_token(connection: socket.socket, seconds: float) -> bool:
    """Returns True if the other end says within some seconds that it is a front."""
    connection.settimeout(seconds)
    with suppress(OSError):
        return _receive(connection, len(_BANNER)) == _BANNER
    return False


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    """Returns so many bytes, or fewer if the connection ends."""
    content = b""
    while len(content) < nbytes and (more := connection.recv(nbytes - len(content))):
        content += more
    return content


class Relay:
    """Listens, and connects each connection that is accepted with another one. Runs in a thread."""

    def __init__(self, listener: socket.socket, connect: Connect, ends_with_last: bool = False) -> None:
        """
        Args:
            connect: returns the connection that goes with one. Raises LoadError to refuse it.
            ends_with_last: whether to end when all connections have ended.
        """
        self._listener = listener
        self._connect = connect
        self._ends_with_last = ends_with_last
        self.port: int = self._listener.getsockname()[1]
        self.ended = False
        self._loop = asyncio.new_event_loop()
        self._connections = self._unauthenticated = 0
        # Ends with the process, which need not wait for it.
        self._thread = threading.Thread(target=self._run, name="epload-relay", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        serving = self._loop.create_task(asyncio.start_server(self._take, sock=self._listener, backlog=_BACKLOG))
        self._loop.run_forever()  # until close(), which may come first
        self._listener.close()
        pending = asyncio.all_tasks(self._loop) | {serving}
        for task in pending:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        self._loop.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection."""
        other: Pipe | None = None
        self._connections += 1
        try:
            if self._unauthenticated >= _MAX_UNAUTHENTICATED:
                raise LoadError("too many others have not authenticated themselves yet")
            self._unauthenticated += 1
            try:
                other = await asyncio.wait_for(self._connect(reader, writer), _HANDSHAKE_SECONDS)
            finally:
                self._unauthenticated -= 1
            directions = [_pump(reader, other[1]), _pump(other[0], writer)]
            tasks = [asyncio.ensure_future(direction) for direction in directions]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
        except asyncio.CancelledError:
            return  # the end, which a stream of Python 3.11 would report
        except (OSError, LoadError, TimeoutError, asyncio.IncompleteReadError) as error:
            logger.warning("a connection from %s was refused: %s", writer.get_extra_info("peername"), error)
        finally:
            for stream in (writer, other and other[1]):
                if stream:
                    stream.close()
            self._connections -= 1
            if self._ends_with_last and not self._connections:
                self.ended = True
                self._loop.stop()

    def close(self) -> None:
        """Ends it, with all of its connections."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_HANDSHAKE_SECONDS)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while content := await reader.read(_CHUNK_BYTES):
            writer.write(content)
            await writer.drain()


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at a port: on the loopback interface for an address of that, else on all interfaces. Raises
    OSError: the port is in use, and stays so for some seconds, in which the groups of a sender that was closed let go of it."""
    until = time.monotonic() + _PORT_SECONDS
    while True:
        try:
            return _listen(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= until:
                raise
            gc.collect()  # a sender whose receivers did not fit leaves its store to it
            time.sleep(0.05)


def _listen(host: str, port: int) -> socket.socket:
    if is_loopback(host):
        family, *_, (own, *_) = min(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))  # IPv4, if it has both
        return socket.create_server((str(own), port), family=family, backlog=_BACKLOG)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)


def is_loopback(host: str) -> bool:
    """Returns True for an address of the loopback interface. A machine may have its own name there, which others resolve to
    another address."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def serve_front(listener: socket.socket, store_port: int, token: str) -> Relay:
    """Returns the sender's front: it passes on to a store on the loopback interface what comes from those that know the token."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Pipe:
        challenge = secrets.token_bytes(_NONCE_BYTES)
        writer.write(_BANNER + challenge)
        answer = await reader.readexactly(_NONCE_BYTES + _DIGEST_BYTES)
        nonce, digest = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(digest, _digest(token, b"client", challenge, nonce)):
            writer.write(bytes(_DIGEST_BYTES))  # which is no proof
            raise LoadError("it does not know the token")
        writer.write(_digest(token, b"server", nonce, challenge))
        return await asyncio.open_connection(LOOPBACK, store_port)

    return Relay(listener, connect)


def tunnel(host: str, port: int, where: str, token: str) -> int:
    """Returns the port on this machine's loopback interface that leads to a front: a relay takes connections of this user's
    processes there, and authenticates each to the front. Raises OSError."""

    def authenticated() -> socket.socket:
        connection = socket.create_connection((host, port), _HANDSHAKE_SECONDS)
        authenticate(connection, token, where)
        return connection

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Pipe:
        own = writer.get_extra_info("sockname")[1]
        if _owner(writer.get_extra_info("peername")[1], own) != os.getuid():
            raise LoadError("it is of another user")
        connection = await asyncio.get_running_loop().run_in_executor(None, authenticated)
        return await asyncio.open_connection(sock=connection)

    key = host, port, where, token
    with _lock:
        if key not in _tunnels or _tunnels[key].ended:
            _tunnels[key] = Relay(listen(LOOPBACK, 0), connect, ends_with_last=True)
        return _tunnels[key].port


def _owner(port: int, other: int) -> int | None:
    """Returns the user id of the process that has connected two ports of the loopback interface; None if there is none."""
    ends = [f"0100007F:{number:04X}" for number in (port, other)]  # 127.0.0.1, also as an address of IPv6
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if all(field.endswith(end) for field, end in zip(fields[1:3], ends, strict=True)):
                return int(fields[7])
    return None
