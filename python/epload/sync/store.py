"""The store that both jobs share: served by the sender's first rank, apart from the store of either job."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import NamedTuple, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from epload.core import threads
from epload.core.log import logger
from epload.errors import LoadError, limit_hint, message_of
from epload.native.extension import _C
from epload.ranks.connection import keeping_alive
from epload.sync.token import (
    ENVIRONMENT,
    LOOPBACK,
    Relay,
    asks_for_token,
    authenticate,
    is_loopback,
    listen,
    resolve_token,
    serve_front,
    tunnel,
)

T = TypeVar("T")
PROTOCOL = 15
"""Changes with the messages between the two jobs."""
Address = str | tuple[str, int]
_ADDRESS = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<name>[^:]+)):(?P<port>[0-9]+)")
_GREETING, _SENDERS = "epload", "senders"
_GREETING_SECONDS = 60.0
"""Maximum seconds that a store that answers may take to identify itself."""
_MAX_CALL = timedelta(seconds=60)
"""Maximum time that a call of the sender's own connection takes."""
_BANNER_SECONDS = 0.02
"""Seconds within which a front that is near says what it is; else it is asked again once a TCPStore has failed to connect."""
_CONNECT_SECONDS = 3.0
"""Limit of one attempt to find the sender."""
_CALL_SECONDS = 60.0
"""Limit of a receiver's call of the store, unless it waits for something, and of one attempt to connect a TCPStore. Both ends
look up the names of addresses: a name server that does not answer takes 5 to 10 s each time, while the store serves no one."""
_WARN_SECONDS = 10.0
"""Seconds without a sender after which a receiver logs that it waits."""
_PAUSE_SECONDS = 0.2
"""Seconds between two attempts to connect."""


def parse_address(address: Address) -> tuple[str, int]:
    """Returns host and port of ``"host:port"``, ``"[v6 address]:port"`` or ``(host, port)``.

    Raises:
        ValueError: it is none of these.
        TypeError: it is neither a str nor a pair.
    """
    expected = f"expected an address such as 'trainer0:29600', '[fd00::1]:29600' or ('trainer0', 29600), got {address!r}"
    if isinstance(address, str):
        match = _ADDRESS.fullmatch(address)
        if match is None:
            raise ValueError(f"{expected}: put an IPv6 address in brackets" if address.count(":") > 1 else expected)
        address = match["v6"] or match["name"], int(match["port"])
    if not (isinstance(address, tuple) and list(map(type, address)) == [str, int]):
        raise TypeError(expected)
    host, port = address
    if not host or not 0 <= port < 1 << 16:
        raise ValueError(expected)
    return host, port


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _greeting() -> str:
    return f"epload {_C.version} (sync protocol {PROTOCOL})"


class ServedStore(NamedTuple):
    """A store that this process serves."""

    store: TCPStore
    port: int
    front: Relay | None
    """Takes the connections at the address, if there is a token."""

    def close(self) -> None:
        if self.front is not None:
            self.front.close()


def serve(address: Address, timeout: timedelta, token: str | None = None) -> ServedStore:
    """Makes the store. With port 0, the system chooses one.

    Args:
        token: see :class:`epload.WeightSender`.

    Raises:
        LoadError: the port cannot be bound, or this process does not reach it under that name within ``timeout``.
    """
    host, port = parse_address(address)
    token, front = resolve_token(token), None
    try:
        if not _is_own(host):
            logger.warning(
                "%s is no address of this machine, on which the sender serves it: expected one that leads back here",
                host,
            )
        elif not token and not is_loopback(host):
            logger.warning(
                "whoever can connect to %s can receive the weights, or end the sync: pass the argument token, or set %s, in both "
                "jobs",
                host, ENVIRONMENT,
            )  # fmt: skip
        # A TCPStore would listen on all interfaces, and share a port with that of torchrun without an error.
        listener = listen(host, port)
        port = listener.getsockname()[1]
        inner = listen(LOOPBACK, 0) if token else listener
        target = (LOOPBACK, inner.getsockname()[1]) if token else (host, port)
        store = TCPStore(
            *target, None, True, min(timeout, _MAX_CALL), wait_for_workers=False, master_listen_fd=inner.detach()
        )  # fmt: skip
        if token:
            front = serve_front(listener, target[1], token)
    except (OSError, RuntimeError) as error:
        raise LoadError(
            f"the sender cannot serve {format_address(host, port)}: {message_of(error)}; pass a name of the machine of its first "
            "rank, and another port, or 0 for any"
        ) from error
    if store.add(_SENDERS, 1) != 1:
        if front is not None:
            front.close()
        raise LoadError(f"{format_address(host, port)} leads to another sender: pass an address of this process")
    store.set(_GREETING, _greeting())
    return ServedStore(store, port, front)


def _is_own(host: str) -> bool:
    """Returns True if this machine has an address of that name. Raises OSError if there is no such name."""
    for family, *_, (address, *_) in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
            return True
    return False


def connect(address: Address, timeout: timedelta, token: str | None = None) -> TCPStore:
    """Connects to the sender's store; waits until there is one.

    Args:
        token: see :class:`epload.WeightReceiver`.

    Raises:
        LoadError: there is none within ``timeout``, it is that of another version of epload, it has another token, or this
            process cannot open another socket.
    """
    host, port = parse_address(address)
    where, token = format_address(host, port), resolve_token(token)
    until, warns_at = time.monotonic() + timeout.total_seconds(), time.monotonic() + _WARN_SECONDS
    while True:
        try:
            # A TCPStore would write a warning each time that it cannot connect.
            left = max(0.1, until - time.monotonic())
            seconds = min(_CONNECT_SECONDS, left)
            with socket.create_connection((host, port), seconds) as connection:
                if token:
                    authenticate(connection, token, where)
                elif asks_for_token(connection, _BANNER_SECONDS):
                    raise _no_token(where)
            target = (LOOPBACK, tunnel(host, port, where, token)) if token else (host, port)
            with keeping_alive():
                store = answered(partial(TCPStore, *target, None, False, timedelta(seconds=min(_CALL_SECONDS, left))), timeout)
            store.set_timeout(timedelta(seconds=_CALL_SECONDS))
            break
        except (OSError, RuntimeError) as error:
            if isinstance(error, LoadError):
                raise
            if hint := limit_hint(error):
                raise LoadError(f"no connection to {where}: {message_of(error)}{hint}") from error
            if not token and _is_front(host, port):
                raise _no_token(where) from error
            if time.monotonic() >= warns_at:
                warns_at = until
                logger.warning("waits for a sender at %s: %s", where, message_of(error))
            if time.monotonic() + _PAUSE_SECONDS >= until:
                raise LoadError(
                    f"no sender answers at {where} within {timeout.total_seconds():.0f} s: {message_of(error)}; is the trainer "
                    "running, and does it serve this address?"
                ) from error
            time.sleep(_PAUSE_SECONDS)
    try:
        store.wait([_GREETING], timedelta(seconds=_GREETING_SECONDS))
        greeting = store.get(_GREETING).decode()
    except RuntimeError as error:
        raise LoadError(f"the store at {where} is not that of an epload.WeightSender; is the port another job's?") from error
    if greeting != _greeting():
        raise LoadError(
            f"the sender at {where} is {greeting}, this receiver is {_greeting()}; install the same version in both jobs"
        )
    return store


def _is_front(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), 1.0) as connection:
        return asks_for_token(connection, 1.0)
    return False


def _no_token(where: str) -> LoadError:
    return LoadError(f"the sender at {where} asks for a token: pass the argument token, or set {ENVIRONMENT}, as in its job")


def answered(call: Callable[[], T], timeout: timedelta) -> T:
    """Returns the result of a call of the store. It runs in a thread, as a host that has stopped would let it wait without end.

    Raises:
        LoadError: it takes longer than ``timeout``.
    """
    answer = threads.call("epload-store", call)
    if not wait([answer], timeout.total_seconds()).done:
        raise LoadError(
            f"the sender's store has not answered within {timeout.total_seconds():.0f} s; is the trainer's first rank stopped?"
        )
    return answer.result()


def tell(call: Callable[[], object], timeout: timedelta) -> None:
    """Makes a call of the store that needs no answer, and waits for it at most for ``timeout``, whatever becomes of it. At exit,
    when Python 3.12 starts no threads, it is made in this one."""
    with suppress(RuntimeError):
        try:
            answer = threads.call("epload-store", call)
        except LoadError:
            call()
            return
        wait([answer], timeout.total_seconds())
