"""Finds a checkpoint: the store that a path or URL means, and the files in it that are meant."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from epload.checkpoint import file_sets, hub, local_store, object_store
from epload.checkpoint.byte_store import ByteStore, Progress, Shared, Source
from epload.checkpoint.index import Index
from epload.core.log import logger
from epload.errors import CheckpointError

Locate = Callable[[Source, str, Progress, Shared | None], tuple[ByteStore, str] | None]
STORES: tuple[Locate, ...] = (hub.locate, object_store.locate, local_store.locate)
"""The stores: functions that find what a path or URL means. The first that knows it has it. A store that downloads does so here.

They get the path or URL; the variant of the weights; a function to call with numbers of bytes as they are downloaded; and what
another rank has opened, if this one joins it. They return the folder and the name of the file in it that is meant, "" for the
folder itself; None if the path or URL is of another store. They raise CheckpointError if there is nothing."""


@contextmanager
def located(
    source: Source, variant: str = "", progress: Progress | None = None, shared: Shared | None = None
) -> Iterator[tuple[ByteStore, str]]:
    """Yields what one of :data:`STORES` returns. If the body fails, closes the files."""
    try:
        report = progress or (lambda nbytes: None)
        store, name = next(filter(None, (locate(source, variant, report, shared) for locate in STORES)))
        try:
            yield store, name
        except BaseException:
            store.close()
            raise
    except OSError as error:
        raise unreadable(error) from error


def unreadable(error: OSError) -> CheckpointError:
    """Returns what all ranks raise for a file that cannot be read."""
    file = f" {error.filename}" if error.filename else ""
    return CheckpointError(f"cannot read{file}: {error.strerror or error}")


def choose(store: ByteStore, name: str, prefix: str, variant: str) -> list[str]:
    """Returns the files of a checkpoint to open, or the index of them.

    Args:
        store: the folder that :func:`located` has found.
        name: the file in it, which is then the only one; empty for the folder.
    """
    if name:
        check_no_options(store.path_of(name), prefix, variant)
        return [name]
    names = store.names([file_sets.CONFIG, file_sets.DCP, *file_sets.standard_names(variant)])
    if prefix and file_sets.DCP in names:  # a prefix is not for the other weights that the folder may have
        if variant:
            raise ValueError(f"{store}: expected prefix= or variant=, got prefix={prefix!r} and variant={variant!r}")
        return [file_sets.DCP]
    check_no_options(str(store), prefix)
    chosen = file_sets.choose(names, str(store), variant, store.peek)
    adapters = set(names).intersection(file_sets.ADAPTERS) if file_sets.ADAPTER_CONFIG in names else set()
    if adapters and not adapters.intersection(chosen):
        logger.warning(
            "%s has an adapter beside its weights, which is not loaded: with PEFT, from_pretrained() applies it. Load it "
            "into a PEFT model by the path of %s", store, min(adapters),
        )  # fmt: skip
    return chosen


def open_named(store: ByteStore, index: Index, names: Sequence[str]) -> None:
    """Opens the files that an index names. Raises CheckpointError if there is none of a name; OSError."""
    try:
        store.open(names)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"cannot read {error.filename}, which {index.file} names: there is no such file in its folder; copy it again"
        ) from error


def check_no_options(source: str, prefix: str, variant: str = "") -> None:
    if prefix and prefix != file_sets.DCP_ROOT:
        raise ValueError(
            f"prefix={prefix!r} is where the model is in a DCP folder, which {source} is not; to change names, pass "
            "mapping=epload.Mapping(renames=...) to a load, or renames= to epload.convert()"
        )
    if variant:
        raise ValueError(
            f"variant={variant!r} chooses between the sets of weights in a folder, which {source} is not; pass the folder, or "
            "leave it out"
        )


def read_config(source: Any) -> dict[str, Any]:
    """Returns the content of the ``config.json`` of a path or URL; empty if there is none. Raises as :func:`read_json`."""
    if not isinstance(source, str | os.PathLike):
        return {}
    if (model := hub.parse(source)) is not None:
        folder = hub.with_config(*model)
        return {} if folder is None else read_json(folder, file_sets.CONFIG)
    with located(source) as (store, _):
        return read_json(store, file_sets.CONFIG)


def read_json(store: ByteStore, name: str) -> dict[str, Any]:
    """Returns the content of a file in a folder; empty if there is none. Raises CheckpointError if it cannot be read, or is no
    JSON object."""
    try:
        content = json.loads(store.peek(name))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise unreadable(error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{store.path_of(name)} is no JSON ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"expected a JSON object in {store.path_of(name)}, got {str(content)[:100]}")
    return content
