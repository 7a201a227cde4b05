"""Bytes of any length in a store: under a key, or under a name that follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from torch import Tensor
from torch.distributed.distributed_c10d import Store

from epload.errors import LoadError, message_of
from epload.planning.holdings import HoldingsSummary, digest_of

_PART_BYTES = 4 << 20
"""Maximum bytes of one value; the store accepts up to 8 MiB."""


def put(store: Store, key: str, content: bytes) -> None:
    """Sets a key to bytes, however many."""
    parts = [content[begin : begin + _PART_BYTES] for begin in range(0, len(content), _PART_BYTES)] or [b""]
    for number, part in enumerate(parts):
        store.set(f"{key}/{number}", part)  # type: ignore[arg-type]
    store.set(key, str(len(parts)))


def get(store: Store, key: str, timeout: timedelta) -> bytes:
    """Returns the bytes that :func:`put` has set a key to. Waits until they are there.

    Raises:
        LoadError: the store is lost, or the content is not there in time.
    """
    try:
        store.wait([key], timeout)
        return b"".join(store.get(f"{key}/{number}") for number in range(int(store.get(key))))
    except RuntimeError as error:
        raise LoadError(f"the store has no {key}: {message_of(error)}") from error


def publish(store: Store, content: bytes) -> str:
    """Puts bytes into the store, unless they are there; returns the name under which :func:`fetch` finds them. Ranks that publish
    the same at once write the same."""
    name = digest_of(content)
    if not store.check([f"content/{name}"]):
        put(store, f"content/{name}", content)
    return name


def fetch(store: Store, name: str, timeout: timedelta) -> bytes:
    """Returns what any rank has published under ``name``. Raises LoadError as :func:`get`."""
    content = get(store, f"content/{name}", timeout)
    if digest_of(content) != name:
        raise LoadError(f"the store's content {name} has changed")
    return content


def publish_summary(store: Store, summary: HoldingsSummary) -> list[str]:
    """Publishes a rank's summary; returns what :func:`fetch_summaries` needs."""
    return [publish(store, part) for part in summary.encode()]


def fetch_summaries(store: Store, names: Sequence[Sequence[str]], timeout: timedelta) -> list[HoldingsSummary]:
    """Fetches the summaries of several ranks. Equal ones are fetched once and are one object, and so are their columns."""
    summaries: dict[tuple[str, ...], HoldingsSummary] = {}
    columns: dict[str, tuple[bytes, Tensor]] = {}
    for key in map(tuple, names):
        if key not in summaries:
            content = columns[key[0]][0] if key[0] in columns else fetch(store, key[0], timeout)
            summary = HoldingsSummary.decode(content, fetch(store, key[1], timeout))
            _, class_of = columns.setdefault(key[0], (content, summary.class_of))
            summaries[key] = replace(summary, class_of=class_of)
    return [summaries[tuple(key)] for key in names]
