"""Content that a rank publishes in a store for those that need it, under a name that follows from the content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from itertools import chain

from torch import Tensor
from torch.distributed.distributed_c10d import Store

from epload.errors import LoadError, message_of
from epload.planning.holdings import Holdings, digest_of
from epload.ranks import messages

_BATCH = 64
"""Contents that are fetched at once, of up to 4 MiB each."""


def get(store: Store, key: str, timeout: timedelta) -> bytes:
    """Returns the message that :func:`epload.ranks.messages.put` has set a key to. Waits until it is there.

    Raises:
        LoadError: the store is lost, or the message is not there in time.
    """
    try:
        store.wait([key], timeout)
        return messages.decode(store, key, store.get(key))
    except RuntimeError as error:
        raise LoadError(f"the store has no {key}: {message_of(error)}") from error


def publish(store: Store, content: bytes) -> str:
    """Puts bytes into the store, unless they are there; returns the name under which :func:`fetch` finds them. Ranks that publish
    the same at once write the same."""
    name = digest_of(content)
    if not store.check([f"content/{name}"]):
        messages.put(store, f"content/{name}", content)
    return name


def fetch(store: Store, name: str, timeout: timedelta) -> bytes:
    """Returns what any rank has published under ``name``. Raises LoadError as :func:`get`."""
    return get(store, f"content/{name}", timeout)


def _fetch_all(store: Store, names: Sequence[str], timeout: timedelta) -> dict[str, bytes]:
    """Fetches several contents: each rank of thousands needs those of all, for which the store has one thread."""
    contents = {}
    try:
        for batch in (names[at : at + _BATCH] for at in range(0, len(names), _BATCH)):
            keys = [f"content/{name}" for name in batch]
            store.wait(keys, timeout)
            for name, key, value in zip(batch, keys, store.multi_get(keys), strict=True):
                contents[name] = messages.decode(store, key, value)
    except RuntimeError as error:
        raise LoadError(f"the store has not what other ranks have of the tensors: {message_of(error)}") from error
    return contents


def publish_holdings(store: Store, holdings: Holdings) -> list[str]:
    """Publishes a rank's holdings; returns what :func:`fetch_holdings` needs."""
    return [publish(store, part) for part in holdings.encode()]


def fetch_holdings(store: Store, names: Sequence[Sequence[str]], timeout: timedelta) -> list[Holdings]:
    """Fetches the holdings of several ranks, without targets. Equal ones are fetched once and are one object, and so are their
    columns."""
    contents = _fetch_all(store, list(dict.fromkeys(chain.from_iterable(names))), timeout)
    class_of: dict[str, Tensor] = {}

    @cache
    def holdings_of(columns: str, classes: str) -> Holdings:
        holdings = Holdings.decode(contents[columns], contents[classes])
        return replace(holdings, class_of=class_of.setdefault(columns, holdings.class_of))

    return [holdings_of(*parts) for parts in names]
