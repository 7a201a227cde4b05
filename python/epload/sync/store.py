"""The store that both jobs share: served by the sender's first rank, apart from the store of either job."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]

from epload.core import threads
from epload.core.attempt import Attempt
from epload.errors import LoadError, message_of
from epload.native.extension import _C
from epload.ranks.messages import read_if_set

T = TypeVar("T")
PROTOCOL = 7
"""Changes with what the two jobs say to each other."""
Address = str | tuple[str, int]
_GREETING = "epload"
_GREETING_SECONDS = 10.0
"""Maximum seconds that a store that answers may take to identify itself."""
_PAUSE_SECONDS = 0.2
"""Seconds between two attempts to connect."""


def parse_address(address: Address) -> tuple[str, int]:
    """Returns host and port of ``"host:port"``, ``"[v6 address]:port"`` or ``(host, port)``.

    Raises:
        ValueError: it is none of these.
        TypeError: it is neither a str nor a pair.
    """
    expected = (
        f"expected an address such as 'trainer0:29600', '[fe80::1]:29600' or ('trainer0', 29600), got {address!r}"
    )
    if isinstance(address, str):
        host, _, number = address.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ValueError(f"{expected}: put an IPv6 address in brackets")
        port = int(number) if number.isascii() and number.isdecimal() else -1
    else:
        if not isinstance(address, tuple) or len(address) != 2:
            raise TypeError(expected)
        host, port = address
        if not isinstance(host, str) or not isinstance(port, int) or isinstance(port, bool):
            raise TypeError(expected)
    if not host or not 0 <= port < 1 << 16:
        raise ValueError(expected)
    return host, port


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def serve(address: Address) -> TCPStore:
    """Makes the store. With port 0, the system chooses one.

    Raises:
        LoadError: the port cannot be bound.
    """
    host, port = parse_address(address)
    try:
        store = TCPStore(host, port, None, True, timedelta(seconds=60), wait_for_workers=False)
    except (DistNetworkError, RuntimeError) as error:
        raise LoadError(
            f"the sender cannot serve {format_address(host, port)}: {message_of(error)}; pass another port, or 0 for any"
        ) from error
    store.set(_GREETING, json.dumps({"epload": _C.version, "protocol": PROTOCOL}))
    return store


def connect(address: Address, timeout: timedelta) -> TCPStore:
    """Connects to the sender's store; waits until there is one.

    Raises:
        LoadError: there is none within ``timeout``, or it is that of another version of epload.
    """
    host, port = parse_address(address)
    where = format_address(host, port)
    until = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), max(0.1, min(10.0, until - time.monotonic()))).close()
            store = answered(lambda: TCPStore(host, port, None, False, timedelta(seconds=10)), timeout)
            break
        except (OSError, RuntimeError) as error:
            if time.monotonic() + _PAUSE_SECONDS >= until:
                raise LoadError(
                    f"no sender answers at {where} within {timeout.total_seconds():.0f} s: {message_of(error)}; is the trainer "
                    "running, and does it serve this address?"
                ) from error
            time.sleep(_PAUSE_SECONDS)
    _check_greeting(store, where)
    return store


def _check_greeting(store: TCPStore, where: str) -> None:
    until = time.monotonic() + _GREETING_SECONDS
    while (greeting := read_if_set(store, _GREETING)) is None:
        if time.monotonic() >= until:
            raise LoadError(f"the store at {where} is not that of an epload.WeightSender; is the port another job's?")
        time.sleep(_PAUSE_SECONDS)
    sender = json.loads(greeting)
    if (sender["epload"], sender["protocol"]) != (_C.version, PROTOCOL):
        raise LoadError(
            f"the sender at {where} is epload {sender['epload']} (sync protocol {sender['protocol']}), this receiver is epload "
            f"{_C.version} (protocol {PROTOCOL}); install the same version in both jobs"
        )


def answered(call: Callable[[], T], timeout: timedelta) -> T:
    """Returns the result of a call of the store. It runs in a thread, as a host that has stopped would let it wait without end.

    Raises:
        LoadError: it takes longer than ``timeout``.
    """
    outcomes: list[Attempt[T]] = []
    threads.start("epload-store", lambda: outcomes.append(Attempt(call))).join(timeout.total_seconds())
    if not outcomes:
        raise LoadError(
            f"the sender's store has not answered within {timeout.total_seconds():.0f} s; is the trainer's first rank stopped?"
        )
    return outcomes[0].value
