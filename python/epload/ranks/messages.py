"""Texts and bytes that ranks leave for one another in the store. Each rank deletes the keys that it has set itself, so that a
rank's work does not grow with the number of ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

from torch.distributed.distributed_c10d import Store

_VALUE_BYTES = 4 << 20
"""Size of one value; the store accepts up to 8 MiB."""
_MIN_COMPRESSED = 1 << 10
"""Shorter texts are not worth compressing. Longer ones list ranks, or what they have in common."""
_PLAIN, _COMPRESSED, _PARTS = b"=", b"z", b"#"
"""The first byte of a value: a text, a compressed text, or the number of parts that such a value is in."""
_UNSET = "?"
"""No key of the store has this value."""


def read_if_set(store: Store, key: str) -> bytes | None:
    """The value of ``key``, in one operation that does not wait. After :meth:`Store.check`, :meth:`Store.get` would wait for as
    long as the store's timeout if another rank had deleted the key in between.

    Not for a key that some rank waits for: a TCPStore wakes it, with an empty value.
    """
    value = bytes(store.compare_set(key, _UNSET, _UNSET))  # sets nothing: not a missing key, nor one with another value
    return value if value != _UNSET.encode() else None


class MessageStore:
    """The messages of one rank of a control. For the thread that runs the rounds."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: list[str] = []
        """Keys to delete once all ranks have come to a later round."""
        self._released: list[str] = []
        """Keys that no rank needs any more."""
        self._sent: list[str] = []
        """Keys of :meth:`send`."""

    def post(self, key: str, text: str) -> None:
        """Sets a text for other ranks. Deleted after the next :meth:`release`."""
        self._kept.append(key)
        self._store.set(key, self.encode(key, text))  # type: ignore[arg-type]

    def encode(self, key: str, text: str) -> bytes:
        """The value of ``key`` for a text. If it is large, sets its parts, which are deleted as by :meth:`post`."""
        data = text.encode(errors="backslashreplace")
        data = _PLAIN + data if len(data) < _MIN_COMPRESSED else _COMPRESSED + zlib.compress(data, 1)
        if len(data) <= _VALUE_BYTES:
            return data
        parts = [data[begin : begin + _VALUE_BYTES] for begin in range(0, len(data), _VALUE_BYTES)]
        for number, part in enumerate(parts):
            self._kept.append(f"{key}/{number}")
            self._store.set(f"{key}/{number}", part)  # type: ignore[arg-type]
        return _PARTS + str(len(parts)).encode()

    def decode(self, key: str, value: bytes) -> str:
        """The text of a value that :meth:`encode` returned on any rank."""
        if value.startswith(_PARTS):
            value = b"".join(self._store.get(f"{key}/{number}") for number in range(int(value[1:])))
        return (zlib.decompress(value[1:]) if value.startswith(_COMPRESSED) else value[1:]).decode()

    def has(self, key: str) -> bool:
        """Returns True if ``key`` is set."""
        return bool(self._store.check([key]))

    def fill(self, keys: Iterable[str], value: bytes) -> None:
        """Sets those of ``keys`` that are not set, which ends a wait for them. Deleted as by :meth:`post`."""
        for key in keys:
            self._store.compare_set(key, "", value)  # type: ignore[arg-type]
            self._kept.append(key)

    def send(self, prefix: str, rank: int, messages: Mapping[int, bytes]) -> None:
        """Sends messages of ``rank``, by receiver. They stay until :meth:`delete_sent`."""
        for receiver, message in messages.items():
            starts = range(0, len(message), _VALUE_BYTES) or range(1)
            for number, begin in enumerate(starts):
                key = f"{prefix}/{rank}/{receiver}/{number}"
                part = bytes([begin == starts[-1]]) + message[begin : begin + _VALUE_BYTES]
                self._store.set(key, part)  # type: ignore[arg-type]
                self._sent.append(key)

    def receive(self, prefix: str, rank: int, senders: Iterable[int]) -> dict[int, bytes]:
        """The messages sent to ``rank`` under ``prefix``."""
        messages = {}
        for sender in senders:
            message, last, number = b"", 0, 0
            while not last:
                last, *_ = part = self._store.get(f"{prefix}/{sender}/{rank}/{number}")
                message += part[1:]
                number += 1
            messages[sender] = message
        return messages

    def delete_sent(self) -> None:
        """Deletes what this rank has sent, once all receivers have read it."""
        self._delete(self._sent)

    def keep_sent(self) -> None:
        """Deletes what this rank has sent only after the next :meth:`release`: a receiver may still be reading it."""
        self.delete_later(self._sent)
        self._sent = []

    def delete_later(self, keys: Iterable[str]) -> None:
        """Adds keys that no rank needs once all ranks have come to the next round."""
        self._kept += keys

    def release(self) -> None:
        """All ranks have come to this rank's round, and need nothing that it has set so far."""
        self._released += self._kept
        self._kept = []

    def delete_released(self) -> None:
        self._delete(self._released)

    def _delete(self, keys: list[str]) -> None:
        for key in keys:
            self._store.delete_key(key)
        keys.clear()
