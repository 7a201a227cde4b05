"""Finds out for ``epload verify`` whether files are those that their author has published."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path, PurePosixPath

import click

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.checksums import Checksums
from epload.checkpoint.file_sets import DELTA
from epload.checkpoint.local_store import LocalStore
from epload.errors import CheckpointError
from epload.loading.checked_files import check_parts
from epload.observe.render import count, show_bytes


def compare_files(checkpoint: Checkpoint, given: str) -> str:
    """Compares the files of a checkpoint, and the others in its folder that are listed, with their digests. Returns what was
    compared. Raises CheckpointError if a file is another one, is not listed, or is listed and not there."""
    checksums = Checksums.read(True if given == "published" else given, checkpoint)
    store, parts = checkpoint._store, checksums.parts(checkpoint) + checksums.other_parts(checkpoint)
    if isinstance(store, LocalStore):
        compared, listed = {part.file.name for part in parts}, checksums.files
        by_last = {name: PurePosixPath(name).name for name in listed}  # a list may have been made in another folder
        others = {name for name, last in by_last.items() if last not in compared or (name != last and last in listed)}
        try:
            for name in sorted(others):
                if PurePosixPath(name).is_absolute() and not PurePosixPath(name).is_relative_to(store.path):
                    raise CheckpointError(f"{checksums.source} names {name}, which is not in {store}")
                (file,) = store.open_files([name])
                parts += checksums.parts_of(file, file.read)
        except OSError as error:
            raise CheckpointError(
                f"cannot read {error.filename}, which {checksums.source} describes: {error.strerror}"
            ) from error
    check_parts(parts, checksums.source, 1, lambda nbytes: None)
    files = {part.file.name for part in parts}
    nbytes = show_bytes(sum(part.nbytes for part in parts))
    return f"{count(len(files), 'file')}, {nbytes}: all as {checksums.source} describes them"


def verify_signature(folder: str, bundle: str, public_key: str | None, identity: str | None, provider: str | None) -> str:
    """Verifies the signature of a folder, all of whose files are read. Returns what was verified.

    Raises:
        CheckpointError: it is not the signature of these files, or of somebody else.
        click.BadParameter: the arguments do not say who should have signed.
        click.ClickException: the library is not installed.
    """
    path = Path(folder)
    if not path.is_dir():
        raise click.BadParameter(f"expected a folder of this machine, got {folder}", param_hint="CHECKPOINT")
    if (public_key is None) == (identity is None) or (identity is None) != (provider is None):
        raise click.BadParameter("expected --public-key, or --identity and --identity-provider with it", param_hint="--signature")
    if (path / DELTA).exists():
        raise CheckpointError(
            f"{folder} has only what has changed since another checkpoint, which its signature does not cover; convert it to a "
            "whole one, and sign that"
        )
    try:
        verifying = import_module("model_signing.verifying")
    except ImportError as error:
        raise click.ClickException("--signature needs model-signing: pip install epload[signing]") from error
    config = verifying.Config()
    if public_key is not None:
        config, signer = config.use_elliptic_key_verifier(public_key=public_key), f"the key {public_key}"
    else:
        config, signer = config.use_sigstore_verifier(identity=identity, oidc_issuer=provider), str(identity)
    try:
        config.verify(path, Path(bundle))
    except Exception as error:  # the library's own, and those of the libraries that it uses
        raise CheckpointError(f"{bundle} is no signature of {folder} by {signer}: {error}") from error
    return f"{bundle} is a signature by {signer} of {folder}, without what it leaves out itself"
