"""Messages of any length in the store, one a key."""

from __future__ import annotations

import zlib

from torch.distributed.distributed_c10d import Store

_VALUE_BYTES = 4 << 20
"""Size of one value; the store accepts up to 8 MiB."""
_MIN_COMPRESSED = 1 << 10
"""Number of bytes from which a message is compressed: it then lists ranks, or what they have in common."""
_PLAIN, _COMPRESSED, _PARTS = b"=", b"z", b"#"
"""The first byte of a value: a message, a compressed one, or the size of such a value that is in parts."""
_UNSET = "?"
"""No key of the store has this value."""


def read_if_set(store: Store, key: str) -> bytes | None:
    """Returns the value of ``key``, in one operation that does not wait. After :meth:`Store.check`, :meth:`Store.get` would wait
    for as long as the store's timeout if another rank had deleted the key in between.

    Not for a key in whose wait inside the store some rank is: a TCPStore wakes it, with an empty value.
    """
    value = bytes(store.compare_set(key, _UNSET, _UNSET))  # sets nothing: not a missing key, nor one with another value
    return value if value != _UNSET.encode() else None


def put(store: Store, key: str, data: bytes) -> list[str]:
    """Sets ``key`` to a message; returns the keys that it has set."""
    value, keys = encode(store, key, data)
    store.set(key, value)  # type: ignore[arg-type]
    return [key, *keys]


def encode(store: Store, key: str, data: bytes) -> tuple[bytes, list[str]]:
    """Returns the value of ``key`` for a message; if it is large, sets its parts, and returns their keys, too."""
    data = _PLAIN + data if len(data) < _MIN_COMPRESSED else _COMPRESSED + zlib.compress(data, 1)
    if len(data) <= _VALUE_BYTES:
        return data, []
    keys = []
    for begin in range(0, len(data), _VALUE_BYTES):
        keys.append(f"{key}/{begin}")
        store.set(keys[-1], data[begin : begin + _VALUE_BYTES])  # type: ignore[arg-type]
    return _PARTS + str(len(data)).encode(), keys


def decode(store: Store, key: str, value: bytes) -> bytes:
    """Returns the message of a value that :func:`encode` returned on any rank."""
    if value.startswith(_PARTS):
        value = b"".join(store.get(f"{key}/{begin}") for begin in range(0, int(value[1:]), _VALUE_BYTES))
    return zlib.decompress(value[1:]) if value.startswith(_COMPRESSED) else value[1:]
