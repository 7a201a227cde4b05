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
from pathlib import Path
from typing import Any, NamedTuple

from epload.checkpoint import file_sets
from epload.checkpoint.base import Progress
from epload.checkpoint.byte_store import Folder, Shared
from epload.checkpoint.local_store import LocalFolder
from epload.errors import CheckpointError
from epload.files import read_regular

SCHEME = "hf://"
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"@([0-9a-f]{40})(?:/|$)")
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".json")
_HTTP_LIBRARIES = ("httpx", "httpx2", "httpcore", "requests")
_POLL_SECONDS = 0.2


class HubModel(NamedTuple):
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

    @classmethod
    def locate(
        cls, source: str | os.PathLike[str], variant: str, progress: Progress, shared: Shared | None
    ) -> tuple[Folder, str] | None:
        """Brings the weights, their index and the configuration into the cache, if they are not there yet; with ``shared`` those
        of the commit that the other rank reads."""
        if (model := parse(source)) is None:
            return None
        if shared is None:
            return _download(model, variant, progress), ""
        commit = _COMMIT.search(shared[0])
        if commit is None:
            raise CheckpointError(
                f"rank src reads {shared[0]}, which is not of the Hub: pass the same path on every rank"
            )
        hub, model = _library(model), HubModel(model.name, commit[1])
        with _locked(hub, model, progress):
            return HubFolder(_snapshot(hub, model, commit[1], shared[1]), model), ""

    def path_of(self, name: str) -> str:
        return f"{self._model}/{name}"

    def __str__(self) -> str:
        return str(self._model)


def parse(source: object) -> HubModel | None:
    """Returns the model that ``hf://org/name@revision`` or ``org/name`` names, if no path has that name; else None. Without
    ``hf://``, a name that ends like a file is a path, perhaps a wrong one.

    Raises:
        CheckpointError: a malformed hf:// address.
    """
    if not isinstance(source, str):
        return None
    address = source.removeprefix(SCHEME)
    name, _, revision = address.partition("@")
    if address != source:
        if not _ID.fullmatch(name) or address.endswith("@"):
            raise CheckpointError(f"expected hf://org/name or hf://org/name@revision, got {source!r}")
        return HubModel(name, revision or None)
    is_file = address.endswith(_SUFFIXES)
    return HubModel(address) if _ID.fullmatch(address) and not is_file and not os.path.lexists(address) else None


def _download(model: HubModel, variant: str, progress: Progress) -> HubFolder:
    """Raises CheckpointError: the model is not on the Hub, or not accessible, or neither reachable nor cached."""
    hub = _library(model)
    try:
        info = hub.HfApi().model_info(model.name, revision=model.revision)
    except Exception as error:
        refused = isinstance(error, hub.errors.HfHubHTTPError) and error.response.status_code < 500
        names = [] if refused else [*file_sets.standard_names(variant), file_sets.CONFIG]
        cached = (hub.try_to_load_from_cache(model.name, name, revision=model.revision) for name in names)
        if (file := next((path for path in cached if isinstance(path, str)), None)) is not None:
            return HubFolder(Path(file).parent, HubModel(model.name, Path(file).parent.name))
        raise _describe(hub, model, error) from None
    commit: str = info.sha
    with _locked(hub, HubModel(model.name, commit), progress):

        def content(name: str) -> bytes:
            return read_regular(Path(hub.hf_hub_download(model.name, name, revision=commit)))

        names = [sibling.rfilename for sibling in info.siblings or ()]
        patterns = _required(names, str(HubModel(model.name, commit)), variant, content)
        path = _snapshot(hub, model, commit, patterns)
    return HubFolder(path, HubModel(model.name, path.name))


def _snapshot(hub: Any, model: HubModel, commit: str, names: Sequence[str]) -> Path:
    """Downloads files, unless the cache has them for this revision and commit."""
    paths = [hub.try_to_load_from_cache(model.name, name, revision=model.revision) for name in names]
    if paths and all(isinstance(path, str) and Path(path).parent.name == commit for path in paths):
        return Path(paths[0]).parent
    return Path(hub.snapshot_download(model.name, revision=model.revision, allow_patterns=list(names)))


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


def _required(names: Sequence[str], where: str, variant: str, content: Callable[[str], bytes]) -> list[str]:
    """Returns the files of a repository that are loaded: one set of weights, with its index and the configuration.

    Args:
        names: all files.
        where: the repository, for messages.
        variant: of the weights.
        content: downloads a file.

    Raises:
        CheckpointError: as :func:`file_sets.choose`.
    """
    top = [name for name in names if "/" not in name]
    configs = [name for name in top if name in (file_sets.CONFIG, "hf_quant_config.json")]
    named = file_sets.weights_in_config(content(file_sets.CONFIG)) if file_sets.CONFIG in configs else ""
    chosen = file_sets.choose(top, where, variant, named)
    if chosen[0].endswith(".json"):
        with suppress(
            ValueError, KeyError, TypeError, AttributeError, RecursionError
        ):  # opening it reports what is wrong
            in_index = json.loads(content(chosen[0]))["weight_map"].values()
            chosen += sorted({name for name in in_index if isinstance(name, str)})
    elif chosen == [file_sets.DCP]:
        chosen += [name for name in top if name.endswith((".distcp", ".safetensors"))]
    return [*configs, *chosen]


def _describe(hub: Any, model: HubModel, error: Exception) -> CheckpointError:
    """Returns what to raise, without the text of an HTTP error, which may quote the request."""
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
    elif isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled | OSError) or (
        type(error).__module__.split(".")[0] in _HTTP_LIBRARIES
    ):
        revision = f" --revision {model.revision}" if model.revision else ""
        text = (
            f"no checkpoint at {model.name}{f' in revision {model.revision}' if model.revision else ''}: there is no such path, "
            f"{where} cannot be reached ({type(error).__name__}), and it is not in the cache {hub.constants.HF_HUB_CACHE}; "
            f"download it where there is a network: hf download {model.name}{revision}"
        )
    else:
        text = f"cannot download {model} from {where}: {type(error).__name__}"
    return CheckpointError(text)


@contextmanager
def _locked(hub: Any, model: HubModel, progress: Progress) -> Iterator[None]:
    """Holds the lock of one snapshot in the cache, which a process that dies releases. Calls ``progress`` when the cache grows,
    by whatever process. Raises CheckpointError in place of what huggingface_hub raises."""
    cache, flat = Path(hub.constants.HF_HUB_CACHE), model.name.replace("/", "--")
    (cache / ".locks").mkdir(parents=True, exist_ok=True)
    done = threading.Event()

    def watch() -> None:
        before, last = 0, False
        while not last:
            last = done.wait(_POLL_SECONDS)
            with suppress(OSError):  # it is not there yet, or a file was just renamed
                now = sum(entry.stat().st_size for entry in os.scandir(cache / f"models--{flat}" / "blobs"))
                if now != before:
                    progress(abs(now - before))
                    before = now

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        with open(cache / ".locks" / f"epload--{flat}--{model.revision}.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except CheckpointError:
        raise
    except Exception as error:
        raise _describe(hub, model, error) from None
    finally:
        done.set()
        watcher.join()
