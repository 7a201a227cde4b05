"""The store that both jobs share: served by the sender's first rank, apart from the store of either job."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from epload.core import threads
from epload.core.attempt import attempt
from epload.errors import LoadError, message_of
from epload.native.extension import _C
from epload.ranks.messages import read_if_set

T = TypeVar("T")
PROTOCOL = 6
"""Changes with what the two jobs say to each other."""
Address = str | tuple[str, int]
_GREETING = "epload"
_GREETING_SECONDS = 10.0
"""Maximum seconds that a store that answers may take to identify itself."""
_PAUSE_SECONDS = 0.2
"""Seconds between two attempts to connect."""
_PART_BYTES = 4 << 20
"""Maximum bytes of one value; the store accepts up to 8 MiB."""


def parse_address(address: Address) -> tuple[str, int]:
    """Host and port of ``"host:port"``, ``"[v6 address]:port"`` or ``(host, port)``.

    Raises:
        ValueError: it is none of these.
        TypeError: it is neither a str nor a pair.
    """
    expected = "expected an address such as 'trainer0:29600', '[fe80::1]:29600' or ('trainer0', 29600)"
    if isinstance(address, tuple) and len(address) == 2:
        host, port = address
        if not isinstance(host, str) or not isinstance(port, int) or isinstance(port, bool):
            raise TypeError(f"{expected}, got {address!r}")
    elif isinstance(address, str):
        host, _, number = address.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ValueError(f"{expected}, got {address!r}: put an IPv6 address in brackets")
        if not number.isascii() or not number.isdecimal():
            raise ValueError(f"{expected}, got {address!r}")
        port = int(number)
    else:
        raise TypeError(f"{expected}, got {address!r}")
    if not host or not 0 <= port < 1 << 16:
        raise ValueError(f"{expected}, got {address!r}")
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
    results: list[tuple[T | None, Exception | None]] = []
    thread = threads.start("epload-store", lambda: results.append(attempt(call)))
    thread.join(timeout.total_seconds())
    if not results:
        raise LoadError(
            f"the sender's store has not answered within {timeout.total_seconds():.0f} s; is the trainer's first rank stopped?"
        )
    ((value, error),) = results
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


# ---- values that are named by their content ----


def publish(store: Store, content: bytes) -> str:
    """Puts bytes into the store, unless they are there; returns the name under which :func:`fetch` finds them. Ranks that publish
    the same at once write the same."""
    name = hashlib.blake2b(content, digest_size=16).hexdigest()
    if not store.check([f"content/{name}"]):
        put(store, f"content/{name}", content)
    return name


def fetch(store: Store, name: str, timeout: timedelta) -> bytes:
    """Returns what :func:`publish` was given under ``name``, on any rank. Waits until it is there.

    Raises:
        LoadError: the store is lost, or the content is not there in time.
    """
    content = get(store, f"content/{name}", timeout)
    if hashlib.blake2b(content, digest_size=16).hexdigest() != name:
        raise LoadError(f"the store's content {name} has changed")
    return content


def put(store: Store, key: str, content: bytes) -> None:
    """Sets a key to bytes, however many."""
    parts = [content[begin : begin + _PART_BYTES] for begin in range(0, len(content), _PART_BYTES)] or [b""]
    for number, part in enumerate(parts):
        store.set(f"{key}/{number}", part)  # type: ignore[arg-type]
    store.set(key, str(len(parts)))


def get(store: Store, key: str, timeout: timedelta) -> bytes:
    """The bytes that :func:`put` has set a key to. Waits until they are there.

    Raises:
        LoadError: the store is lost, or the content is not there in time.
    """
    try:
        store.wait([key], timeout)
        return b"".join(store.get(f"{key}/{number}") for number in range(int(store.get(key))))
    except RuntimeError as error:
        raise LoadError(f"the store has no {key}: {message_of(error)}") from error


def post(store: Store, key: str, value: Any) -> None:
    """Sets a key to a JSON value."""
    store.set(key, json.dumps(value))
