"""Texts and bytes that ranks leave for one another in the store. Each rank deletes the keys that it has set itself, so that a
rank's work does not grow with the number of ranks."""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed.distributed_c10d import Store

_VALUE_BYTES = 4 << 20
"""Size of one value; the store accepts up to 8 MiB."""
_PARTS = b"#"
"""Starts a value that holds the number of parts of a text."""


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
        """Sets a text for all ranks, in parts if it is large. Deleted after the next :meth:`release`."""
        data = text.encode(errors="backslashreplace")
        if len(data) > _VALUE_BYTES:
            parts = [data[begin : begin + _VALUE_BYTES] for begin in range(0, len(data), _VALUE_BYTES)]
            for number, part in enumerate(parts):
                self._kept.append(f"{key}/{number}")
                self._store.set(f"{key}/{number}", part)  # type: ignore[arg-type]
            data = _PARTS + str(len(parts)).encode()
        self._kept.append(key)
        self._store.set(key, data)  # type: ignore[arg-type]

    def has(self, keys: list[str]) -> bool:
        """Whether all ``keys`` are set."""
        return self._store.check(keys)

    def read(self, key: str) -> str:
        """The text posted under ``key``."""
        return self._join_parts(key, self._store.get(key))

    def read_all(self, keys: list[str]) -> list[str]:
        """The text posted under each key, in one call to the store if all are small."""
        values = self._store.multi_get(keys) if keys else []
        return [self._join_parts(key, value) for key, value in zip(keys, values, strict=True)]

    def _join_parts(self, key: str, value: bytes) -> str:
        if value.startswith(_PARTS):
            value = b"".join(self._store.get(f"{key}/{number}") for number in range(int(value[len(_PARTS) :])))
        return value.decode()

    def send(self, key: str, message: bytes) -> None:
        """Sets a message for one rank. It stays until :meth:`delete_sent`."""
        starts = range(0, len(message), _VALUE_BYTES) or range(1)
        for number, begin in enumerate(starts):
            part = bytes([begin == starts[-1]]) + message[begin : begin + _VALUE_BYTES]
            self._store.set(f"{key}/{number}", part)  # type: ignore[arg-type]
            self._sent.append(f"{key}/{number}")

    def receive(self, key: str) -> bytes:
        """The message sent under ``key``."""
        message, last, number = b"", 0, 0
        while not last:
            last, *_ = part = self._store.get(f"{key}/{number}")
            message += part[1:]
            number += 1
        return message

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
