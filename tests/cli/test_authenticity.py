"""``epload verify`` with lists of digests, as sha256sum writes them, and signatures, as OpenSSF's library for models does."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import model_signing
import pytest
import torch
from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

import epload
from epload.cli.main import main


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error."""
    result = CliRunner().invoke(main, arguments)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two files with an index, a list of digests and a file that is no part of it."""
    (tmp_path / "config.json").write_text("{}")
    state = {"a": torch.arange(1000), "b": torch.arange(2000)}
    epload.save(state, tmp_path / "c", max_shard_bytes=16000, files=[tmp_path / "config.json"], checksums=True)
    return tmp_path / "c"


def sha256sum(folder: Path) -> Path:
    names = sorted(path.name for path in folder.iterdir())
    listed = folder.parent / "SHA256SUMS"
    listed.write_bytes(subprocess.run(["sha256sum", *names], cwd=folder, capture_output=True, check=True).stdout)
    return listed


def change_byte(path: Path) -> None:
    """Changes the last byte of a file, or of JSON one that means nothing."""
    content = path.read_bytes()
    path.write_bytes(
        content.replace(b" ", b"\n", 1) if b" " in content[:9] else content[:-1] + bytes([content[-1] ^ 1])
    )


@pytest.mark.parametrize("kind", ["list", "published"])
@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "model.safetensors.index.json", "config.json"])
def test_all_files_are_compared(kind: str, name: str, folder: Path) -> None:
    given = str(sha256sum(folder)) if kind == "list" else kind
    status, output, _ = run("verify", str(folder), "--checksums", given)
    assert status == 0
    assert f"{5 if kind == 'list' else 4} files" in output
    as_json = json.loads(run("verify", str(folder), "--checksums", given, "--json")[1])
    assert as_json["checksums"] in output
    change_byte(folder / name)
    status, output, errors = run("verify", str(folder), "--checksums", given)
    assert status == 1
    assert f"{folder / name} is not the file" in errors
    assert "all as" not in output


def test_a_listed_file_that_is_gone(folder: Path) -> None:
    listed = sha256sum(folder)
    (folder / "config.json").unlink()
    status, _, errors = run("verify", str(folder), "--checksums", str(listed))
    assert status == 1
    assert "config.json, which" in errors


def test_a_listed_file_of_another_folder(folder: Path, tmp_path: Path) -> None:
    listed = sha256sum(folder)
    listed.write_text(f"{listed.read_text()}{'0' * 64}  {tmp_path / 'other'}\n")
    status, _, errors = run("verify", str(folder), "--checksums", str(listed))
    assert status == 1
    assert f"names {tmp_path / 'other'}, which is not in {folder}" in errors


def test_convert_writes_the_list_and_says_its_digest(folder: Path, tmp_path: Path) -> None:
    status, output, _ = run("convert", str(folder), str(tmp_path / "d"), "--checksums")
    assert status == 0
    digest = output.strip().rpartition("; ")[2]
    assert run("verify", str(tmp_path / "d"), "--checksums", digest)[0] == 0
    status, _, errors = run("verify", str(tmp_path / "d"), "--checksums", "sha256:" + "0" * 64)
    assert status == 1
    assert "is not the one that was asked for" in errors


def key_pair(folder: Path, name: str) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


@pytest.mark.parametrize(
    "change",
    [None, lambda folder: change_byte(folder / "config.json"), lambda folder: (folder / "new").touch()],
    ids=["none", "a bit", "a file"],
)
def test_signatures(change: Callable[[Path], None] | None, folder: Path, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, "author")
    _, other = key_pair(tmp_path, "other")
    bundle = tmp_path / "model.sig"
    model_signing.signing.Config().use_elliptic_key_signer(private_key=private).sign(folder, bundle)
    if change is not None:
        change(folder)
    words = ["verify", str(folder), "--signature", str(bundle), "--public-key"]
    status, output, errors = run(*words, str(public))
    if change is None:
        assert status == 0
        assert f"is a signature by the key {public} of {folder}" in output
    else:
        assert (status, "is no signature of" in errors) == (1, True)
    status, _, errors = run(*words, str(other))
    assert (status, "is no signature of" in errors) == (1, True)
    (folder / "epload-delta.json").touch()
    status, _, errors = run(*words, str(public))
    assert (status, "which its signature does not cover" in errors) == (1, True)


@pytest.mark.parametrize(
    "words",
    [
        ["--signature", "FILE"],
        ["--signature", "FILE", "--identity", "a"],
        ["--signature", "FILE", "--public-key", "FILE", "--identity", "a", "--identity-provider", "b"],
        ["--public-key", "FILE"],
    ],
    ids=" ".join,
)
def test_options_that_do_not_say_who_has_signed(words: list[str], folder: Path) -> None:
    status, _, errors = run(
        "verify", str(folder), *[str(folder / "config.json") if word == "FILE" else word for word in words]
    )
    assert status == 2
    assert "expected --" in errors
