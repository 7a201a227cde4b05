"""Models on the Hugging Face Hub, through huggingface_hub: its cache, its offline mode, its tokens.

Of the processes that share a cache one downloads a file and the others wait for it, by huggingface_hub's own locks.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from posixpath import join, normpath
from typing import Any

from epload.checkpoint import file_sets
from epload.checkpoint.byte_store import Progress, Shared, Source, StoredFile
from epload.checkpoint.local_store import LocalFile, LocalStore
from epload.errors import CheckpointError
from epload.files import read_regular

SCHEME = "hf://"
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"@([0-9a-f]{40})(?:/|$)")
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".json")
_HTTP_LIBRARIES = ("httpx", "httpx2", "httpcore", "requests")
_POLL_SECONDS = 0.2


class HubStore(LocalStore):
    """The folder of a model in the cache. Paths relative to it are those of other models: ``../step-1`` of ``hf://org/step-2`` is
    ``hf://org/step-1``, in its default branch."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path, _address(name, path.name))
        self._name = name

    def published(self, file: StoredFile) -> str:
        """The cache has each file under the name of its digest, and a link to it in the folder of the commit."""
        assert isinstance(file, LocalFile)
        with suppress(OSError):  # where a file system has no links, the file itself is there
            return Path(os.readlink(file.path)).name
        return ""

    def resolve(self, relative: str) -> str:
        name = normpath(join(self._name, relative))
        if not _ID.fullmatch(name) or name == self._name:
            raise CheckpointError(f"{self}: expected the path of another model, such as ../NAME, got {relative!r}")
        return _address(name, "")


def locate(source: Source, variant: str, progress: Progress, shared: Shared | None) -> tuple[HubStore, str] | None:
    """See :data:`epload.checkpoint.finding.STORES`. Brings the weights, their index and the configuration into the cache, if they
    are not there yet; with ``shared`` those of the commit that the other rank reads."""
    if (model := parse(source)) is None:
        return None
    name, revision = model
    hub = _library(name)
    if shared is None:
        snapshot = _download(hub, name, revision, variant, progress)
    else:
        commit = _COMMIT.search(shared[0])
        if commit is None:
            raise CheckpointError(f"rank src reads {shared[0]}, which is not of the Hub: pass the same path on every rank")
        with _downloading(hub, name, commit[1], progress):
            snapshot = _fetch(hub, name, commit[1], commit[1], shared[1])
    return HubStore(snapshot, name), ""


def with_config(name: str, revision: str) -> HubStore | None:
    """Returns the folder of a model in the cache, to which no more than the configuration was downloaded; None if it has none.
    Raises CheckpointError."""
    hub = _library(name)
    with _downloading(hub, name, revision, lambda nbytes: None), suppress(hub.errors.RemoteEntryNotFoundError):
        path = hub.hf_hub_download(name, file_sets.CONFIG, revision=revision or None)
        return HubStore(Path(path).parent, name)
    return None


def parse(source: object) -> tuple[str, str] | None:
    """Returns the model ``org/name`` and the revision that ``hf://org/name@revision`` or ``org/name`` names, if no path has that
    name; else None. The revision is "" for the default branch. Without ``hf://``, a name that ends like a file is a path, perhaps
    a wrong one. Raises CheckpointError for a malformed hf:// address."""
    if not isinstance(source, str):
        return None
    if source.startswith(SCHEME):
        name, separator, revision = source.removeprefix(SCHEME).partition("@")
        if not _ID.fullmatch(name) or (separator and not revision):
            raise CheckpointError(f"expected hf://org/name or hf://org/name@revision, got {source!r}")
        return name, revision
    is_model = _ID.fullmatch(source) and not source.endswith(_SUFFIXES) and not os.path.lexists(source)
    return (source, "") if is_model else None


def at_commit(source: str) -> str:
    """Returns ``hf://org/name@commit`` of the source in a manifest; empty if it is not of the Hub."""
    commit = _COMMIT.search(source) if source.startswith(SCHEME) else None
    return source[: commit.end(1)] if commit else ""


def _address(name: str, revision: str) -> str:
    return f"{SCHEME}{name}" + (f"@{revision}" if revision else "")


def _download(hub: Any, name: str, revision: str, variant: str, progress: Progress) -> Path:
    """Returns the folder in the cache. Raises CheckpointError if the model is not on the Hub, or not accessible, or neither
    reachable nor cached."""
    try:
        info = hub.HfApi().model_info(name, revision=revision or None, timeout=hub.constants.HF_HUB_DOWNLOAD_TIMEOUT)
    except Exception as error:
        if not isinstance(error, hub.errors.HfHubHTTPError) or error.response.status_code not in (401, 403, 404):
            with suppress(OSError):
                return _cached(hub, name, revision)
        raise _describe(hub, name, revision, error) from None
    commit: str = info.sha
    with _downloading(hub, name, commit, progress):
        names = [sibling.rfilename for sibling in info.siblings or () if "/" not in sibling.rfilename]
        return _fetch(hub, name, revision, commit, _required(hub, names, name, commit, variant))


def _cached(hub: Any, name: str, revision: str) -> Path:
    """Returns the folder of a revision in the cache. Raises OSError if there is none, or no weights are in it."""
    folder, commit = _folder(hub, name), revision
    with suppress(FileNotFoundError):  # of a revision that is a commit itself
        commit = read_regular(folder / "refs" / (revision or "main")).decode()
    snapshot = folder / "snapshots" / commit
    if not any(entry.name.endswith(file_sets.OF_CHECKPOINTS) for entry in os.scandir(snapshot)):
        raise FileNotFoundError(snapshot)
    return snapshot


def _folder(hub: Any, name: str) -> Path:
    """Returns where the cache has a model."""
    return Path(hub.constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"


def _fetch(hub: Any, name: str, revision: str, commit: str, files: Sequence[str]) -> Path:
    """Downloads files, unless the cache has them for this revision and commit. Returns the folder in the cache."""
    paths = [hub.try_to_load_from_cache(name, file, revision=revision or None) for file in files]
    if paths and all(isinstance(path, str) and Path(path).parent.name == commit for path in paths):
        return Path(paths[0]).parent
    return Path(hub.snapshot_download(name, revision=revision or None, allow_patterns=list(files)))


def _library(name: str) -> Any:
    try:
        for part in ("errors", "constants"):
            importlib.import_module(f"huggingface_hub.{part}")
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise CheckpointError(
            f"no checkpoint at {name}: there is no such path; to load it from the Hugging Face Hub, install "
            "huggingface_hub (pip install epload[hub])"
        ) from error


def _required(hub: Any, names: Sequence[str], name: str, commit: str, variant: str) -> list[str]:
    """Returns the files of a model that are loaded: one set of weights, with its index and the configuration. ``names``: all
    files, but for those in folders."""

    def content(file: str) -> bytes:
        return read_regular(hub.hf_hub_download(name, file, revision=commit))

    chosen = file_sets.choose(names, _address(name, commit), variant, content)
    if chosen == [file_sets.DCP]:
        chosen = chosen + [file for file in names if file.endswith((".distcp", ".safetensors"))]
    elif chosen[0].endswith(".json"):
        # Opening the index reports what is wrong with it.
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            index = json.loads(content(chosen[0]))
            in_index = dict(index["files"]) if chosen == [file_sets.DELTA] else index["weight_map"].values()
            chosen = chosen + sorted(set(in_index).intersection(names))
    described_by = (*file_sets.CONFIGS, file_sets.ADAPTER_CONFIG, file_sets.CHECKSUMS)
    return [*(file for file in described_by if file in names), *chosen]


def _describe(hub: Any, name: str, revision: str, error: Exception) -> CheckpointError:
    """Returns what to raise, without the text of an HTTP error, which may quote the request."""
    errors, where, model = hub.errors, hub.constants.ENDPOINT, _address(name, revision)
    login = "log in with `hf auth login`, or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        text = f"access to {model} is restricted: accept its conditions at {where}/{name}, then {login}"
    elif isinstance(error, errors.RevisionNotFoundError):
        text = f"{name} has no revision {revision} at {where}"
    elif isinstance(error, errors.RepositoryNotFoundError):
        text = (
            f"no checkpoint at {name}: there is neither such a path nor, for this user, such a model at {where}; if it is "
            f"private, {login}"
        )
    elif isinstance(error, errors.HfHubHTTPError):
        text = f"{where} answered {error.response.status_code} for {model}; load again, or pass a local folder"
    elif isinstance(error, OSError) and error.strerror and not isinstance(error, ConnectionError | TimeoutError):
        file = f" {error.filename}:" if error.filename else ""
        text = (
            f"cannot download {model} into the cache {hub.constants.HF_HUB_CACHE}:{file} {error.strerror}; make room there, or "
            "set HF_HOME to a folder that can be written"
        )
    elif isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled | OSError) or (
        type(error).__module__.split(".")[0] in _HTTP_LIBRARIES
    ):
        which, option = (f" in revision {revision}", f" --revision {revision}") if revision else ("", "")
        text = (
            f"no checkpoint at {name}{which}: there is no such path, {where} cannot be reached ({type(error).__name__}), and it "
            f"is not in the cache {hub.constants.HF_HUB_CACHE}; download it where there is a network: hf download {name}{option}"
        )
    else:
        text = f"cannot download {model} from {where}: {type(error).__name__}"
    return CheckpointError(text)


@contextmanager
def _downloading(hub: Any, name: str, commit: str, progress: Progress) -> Iterator[None]:
    """Calls ``progress`` when the cache grows, by whatever process. Raises CheckpointError in place of what huggingface_hub
    raises."""
    blobs = _folder(hub, name) / "blobs"
    done = threading.Event()

    def watch() -> None:
        before, last = 0, False
        while not last:
            last = done.wait(_POLL_SECONDS)
            with suppress(OSError):  # it is not there yet, or a file was just renamed
                now = sum(entry.stat().st_size for entry in os.scandir(blobs))
                if now != before:
                    progress(abs(now - before))
                    before = now

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise _describe(hub, name, commit, error) from None
    finally:
        done.set()
        watcher.join()
