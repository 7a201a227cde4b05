"""Models on the Hugging Face Hub, through huggingface_hub: its cache, its offline mode, its tokens.

Of the processes that share a cache one downloads and the others wait for it, by a lock in the cache: one rank of each node, or of
the job if the cache is on a shared file system.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epload.checkpoint import dcp, file_sets
from epload.checkpoint.local_store import LocalFolder
from epload.errors import CheckpointError
from epload.files import read_regular

SCHEME = "hf://"
Progress = Callable[[int], None]
"""Called with numbers of bytes as they arrive."""
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"@([0-9a-f]{40})(?:/|$)")
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class HubModel:
    """A repository, and which revision of it."""

    name: str
    """``org/name``."""
    revision: str | None = None
    """A branch, a tag or a commit; None for the default branch."""

    def __str__(self) -> str:
        return f"{SCHEME}{self.name}" + (f"@{self.revision}" if self.revision else "")


class HubFolder(LocalFolder):
    """A snapshot in the cache."""

    def __init__(self, path: Path, model: HubModel) -> None:
        super().__init__(path)
        self._model = model

    def path_of(self, name: str) -> str:
        return f"{self._model}/{name}"

    def __str__(self) -> str:
        return str(self._model)


_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".json")


def parse(source: object) -> HubModel | None:
    """The model that ``hf://org/name@revision`` or ``org/name`` names, if no path has that name; else None. Without ``hf://``, a
    name that ends like a file is a path, perhaps a wrong one.

    Raises:
        CheckpointError: a malformed hf:// address.
    """
    if not isinstance(source, str):
        return None
    given = source.removeprefix(SCHEME)
    name, _, revision = given.partition("@")
    if given != source:
        if not _ID.fullmatch(name) or given.endswith("@"):
            raise CheckpointError(f"expected hf://org/name or hf://org/name@revision, got {source!r}")
        return HubModel(name, revision or None)
    is_file = given.endswith(_SUFFIXES)
    return HubModel(given) if _ID.fullmatch(given) and not is_file and not os.path.lexists(given) else None


def download(model: HubModel, variant: str, progress: Progress) -> HubFolder:
    """Brings the weights, their index and the config into the cache, if they are not there yet.

    Args:
        model: the repository.
        variant: of the weights; see :func:`file_sets.choose`.
        progress: called with the number of bytes that have arrived.

    Raises:
        CheckpointError: the model is not on the Hub, or not accessible, or neither reachable nor cached.
    """
    hub = _library(model)
    try:
        info = hub.HfApi().model_info(model.name, revision=model.revision)
    except Exception as error:
        if (cached := _cached(hub, model, variant)) is not None and _may_use_cache(hub, error):
            return cached
        raise _describe(hub, model, error) from None
    pinned = HubModel(model.name, info.sha)
    names = [sibling.rfilename for sibling in info.siblings or ()]

    def wanted() -> list[str]:
        def content(name: str) -> bytes:
            return read_regular(Path(hub.hf_hub_download(model.name, name, revision=info.sha)))

        return _wanted(names, str(pinned), variant, content)

    folder = _fetch(hub, pinned, wanted, progress)
    if model.revision != info.sha:
        _remember(folder, model.revision or hub.constants.DEFAULT_REVISION, info.sha)
    return folder


def join(model: HubModel, source: str, names: Sequence[str], progress: Progress) -> HubFolder:
    """The same files that another rank has.

    Args:
        source: of that rank's manifest, which has the commit.
        names: of the files.

    Raises:
        CheckpointError: as for :func:`download`.
    """
    commit = _COMMIT.search(source)
    if commit is None:
        raise CheckpointError(f"rank src reads {source}, which is not of the Hub: pass the same path on every rank")
    return _fetch(_library(model), HubModel(model.name, commit[1]), lambda: names, progress)


def _library(model: HubModel) -> Any:
    try:
        for part in ("errors", "constants"):
            importlib.import_module(f"huggingface_hub.{part}")
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise CheckpointError(
            f"no checkpoint at {model.name}: there is no such path; to load it from the Hugging Face Hub, install "
            "huggingface_hub (pip install epload[hub])"
        ) from error


def _fetch(hub: Any, model: HubModel, wanted: Callable[[], Sequence[str]], progress: Progress) -> HubFolder:
    """``model``: with a commit."""
    try:
        with _locked(hub, model, progress):
            names = wanted()
            paths = [hub.try_to_load_from_cache(model.name, name, revision=model.revision) for name in names]
            if all(isinstance(path, str) for path in paths) and paths:
                return HubFolder(Path(paths[0]).parent, model)
            folder = hub.snapshot_download(model.name, revision=model.revision, allow_patterns=list(names))
        return HubFolder(Path(folder), model)
    except CheckpointError:
        raise
    except Exception as error:
        raise _describe(hub, model, error) from None


def _wanted(names: Sequence[str], where: str, variant: str, content: Callable[[str], bytes]) -> list[str]:
    """Returns the files of a repository that are loaded: one set of weights, with its index and the config.

    Args:
        names: of all files.
        where: the repository, for messages.
        variant: of the weights.
        content: downloads a file.

    Raises:
        CheckpointError: as :func:`file_sets.choose`.
    """
    top = [name for name in names if "/" not in name]
    config = [name for name in top if name in (file_sets.CONFIG, "hf_quant_config.json")]
    by_config = file_sets.weights_in_config(content(file_sets.CONFIG)) if file_sets.CONFIG in config else ""
    chosen = file_sets.choose(top, where, variant, by_config)
    if chosen[0].endswith(".json"):
        chosen = [*chosen, *_named_in(content(chosen[0]))]
    elif chosen == [dcp.FILE]:
        chosen = [*chosen, *(name for name in top if name.endswith((dcp.SUFFIX, ".safetensors")))]
    return [*config, *chosen]


def _named_in(index: bytes) -> list[str]:
    """The files that an index names; opening it reports what is wrong with it."""
    try:
        return sorted({name for name in json.loads(index)["weight_map"].values() if isinstance(name, str)})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def _cached(hub: Any, model: HubModel, variant: str) -> HubFolder | None:
    """Returns the folder that an earlier download has left in the cache; None if there is none."""
    for name in (*file_sets.standard_names(variant), file_sets.CONFIG):
        path = hub.try_to_load_from_cache(model.name, name, revision=model.revision)
        if isinstance(path, str):
            folder = Path(path).parent
            return HubFolder(folder, HubModel(model.name, folder.name))
    return None


def _remember(folder: HubFolder, revision: str, commit: str) -> None:
    """Writes, where huggingface_hub looks for it, which commit a branch is at, for when the Hub cannot be reached."""
    ref = folder.path.parents[1] / "refs" / revision
    with suppress(OSError):
        ref.parent.mkdir(parents=True, exist_ok=True)
        new = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
        new.write_text(commit)
        new.replace(ref)


def _may_use_cache(hub: Any, error: Exception) -> bool:
    """Returns True if the Hub has given no answer, rather than refused."""
    return not isinstance(error, hub.errors.HfHubHTTPError) or error.response.status_code >= 500


def _describe(hub: Any, model: HubModel, error: Exception) -> CheckpointError:
    """Without the text of an HTTP error, which may quote the request."""
    errors, where = hub.errors, hub.constants.ENDPOINT
    login = "log in with `hf auth login`, or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        text = f"access to {model} is restricted: accept its conditions at {where}/{model.name}, then {login}"
    elif isinstance(error, errors.RevisionNotFoundError):
        text = f"{model.name} has no revision {model.revision} at {where}"
    elif isinstance(error, errors.RepositoryNotFoundError):
        text = (
            f"no checkpoint at {model.name}: there is neither such a path nor, for this user, such a model at {where}; if it is "
            f"private, {login}"
        )
    elif isinstance(error, errors.HfHubHTTPError):
        text = f"{where} answered {error.response.status_code} for {model}; load again, or pass a local folder"
    elif isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled | OSError) or _offline(error):
        revision = f" --revision {model.revision}" if model.revision else ""
        text = (
            f"no checkpoint at {model.name}{f' in revision {model.revision}' if model.revision else ''}: there is no such path, "
            f"{where} cannot be reached ({type(error).__name__}), and it is not in the cache {hub.constants.HF_HUB_CACHE}; "
            f"download it where there is a network: hf download {model.name}{revision}"
        )
    else:
        text = f"cannot download {model} from {where}: {type(error).__name__}"
    return CheckpointError(text)


def _offline(error: Exception) -> bool:
    return type(error).__module__.split(".")[0] in ("httpx", "httpx2", "httpcore", "requests")


@contextmanager
def _locked(hub: Any, model: HubModel, progress: Progress) -> Iterator[None]:
    """Holds the lock of one snapshot in the cache, which a process that dies releases. Calls ``progress`` when the cache grows,
    by whatever process."""
    cache = Path(hub.constants.HF_HUB_CACHE)
    (cache / ".locks").mkdir(parents=True, exist_ok=True)
    flat = model.name.replace("/", "--")
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(cache / f"models--{flat}" / "blobs", progress, over), daemon=True)
    watch.start()
    try:
        with open(cache / ".locks" / f"epload--{flat}--{model.revision}.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    finally:
        over.set()
        watch.join()


def _watch(blobs: Path, progress: Progress, over: threading.Event) -> None:
    """``blobs``: where files grow while they are downloaded."""
    before = 0
    while True:
        last = over.wait(_POLL_SECONDS)
        with suppress(OSError):  # it is not there yet, or a file was just renamed
            now = sum(entry.stat().st_size for entry in os.scandir(blobs))
            if now != before:
                progress(abs(now - before))
                before = now
        if last:
            return
