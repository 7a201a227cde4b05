"""Messages that ranks leave for one another in the store. Each rank deletes the keys that it has set itself, so that a rank's
work does not grow with the number of ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

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


class MessageStore:
    """The messages of one rank of a control. For the thread that runs the rounds."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._keys: list[str] = []
        """Keys to delete once all ranks have come to a later round."""
        self._released: list[str] = []
        """Keys that no rank needs any more."""

    def put(self, key: str, data: bytes) -> list[str]:
        """Sets a message for other ranks. Returns the keys that it has set, for :meth:`delete_later`."""
        value, keys = self.encode(key, data)
        self.store.set(key, value)  # type: ignore[arg-type]
        return [key, *keys]

    def encode(self, key: str, data: bytes) -> tuple[bytes, list[str]]:
        """Returns the value of ``key`` for a message; if it is large, sets its parts, and returns their keys, too."""
        data = _PLAIN + data if len(data) < _MIN_COMPRESSED else _COMPRESSED + zlib.compress(data, 1)
        if len(data) <= _VALUE_BYTES:
            return data, []
        parts = {f"{key}/{begin}": data[begin : begin + _VALUE_BYTES] for begin in range(0, len(data), _VALUE_BYTES)}
        for part, value in parts.items():
            self.store.set(part, value)  # type: ignore[arg-type]
        return _PARTS + str(len(data)).encode(), [*parts]

    def decode(self, key: str, value: bytes) -> bytes:
        """Returns the message of a value that :meth:`encode` returned on any rank."""
        if value.startswith(_PARTS):
            value = b"".join(self.store.get(f"{key}/{begin}") for begin in range(0, int(value[1:]), _VALUE_BYTES))
        return zlib.decompress(value[1:]) if value.startswith(_COMPRESSED) else value[1:]

    def get(self, key: str) -> bytes:
        """Returns a message that is known to be set."""
        return self.decode(key, self.store.get(key))

    def delete_later(self, keys: Iterable[str]) -> None:
        """Deletes keys when all ranks have come to a later round."""
        self._keys += keys

    def release(self) -> None:
        """All ranks have come to this rank's round, and need nothing that it has set so far."""
        self._released += self._keys
        self._keys = []

    def delete_released(self) -> None:
        while self._released:
            self.store.delete_key(self._released.pop())
