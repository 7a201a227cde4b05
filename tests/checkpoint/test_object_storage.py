"""Object storage: what is fetched, how often, and what happens when the server or the network fails. Against a real S3 server."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock
from urllib.parse import quote, unquote

import fsspec
import pytest
import torch
from obstore.store import HTTPStore
from safetensors.torch import save_file

from epload import Checkpoint, CheckpointError, HierarchicalLoader, LoadError, Piece, Topology
from epload.checkpoint import base, object_store, torch_file
from epload.checkpoint.byte_store import StoredFile
from epload.checkpoint.file_checkpoint import FileCheckpoint
from epload.checkpoint.opening import join_source
from epload.core import threads
from support import ranks, s3_server
from support.checkpoint_kinds import folder_with_index, small_state, torch_folder_with_index
from support.checkpoints import assert_same, raw_bytes, read_all, tensor
from support.checks import all_fine
from support.dcp_checkpoints import FORMATS, folder_of, save_all
from support.failures import must_raise
from support.findings import not_refused
from support.s3_server import BUCKET, SECRET, Moto, Proxy
from support.small_model import NODES, meta_net, state_for, wrong
from support.untrusted_server import untrusted

LIBRARIES = ("obstore", "fsspec")
Servers = tuple[Moto, Proxy]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with s3_server.serving() as found:
        yield found


@pytest.fixture
def s3(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> Servers:
    servers[1].reset()
    for name, value in s3_server.environment(servers[1].address).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_store, "FIRST_PAUSE", 0.01)
    # botocore and s3fs retry by themselves, for longer than a test should take.
    few = {"retries": {"max_attempts": 0}, "connect_timeout": 5, "read_timeout": 5}
    options = {"endpoint_url": servers[1].address, "skip_instance_cache": True, "config_kwargs": few}
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    return servers


def only(library: str) -> AbstractContextManager[Any]:
    """Hides the client that comes first."""
    return mock.patch.dict(object_store._OBSTORE, clear=library == "fsspec")


def put(moto: Moto, folder: Path, prefix: str) -> str:
    moto.put_folder(folder, prefix)
    return f"s3://{BUCKET}/{prefix}"


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", [folder_with_index, torch_folder_with_index], ids=lambda f: f.__name__)
def test_folders_files_and_indices(library: str, kind: Any, s3: Servers, tmp_path: Path) -> None:
    kind(tmp_path, small_state())
    url = put(s3[0], tmp_path, f"{kind.__name__}/{library}")
    with only(library):
        sources = [url, f"{url}/"] + [f"{url}/{path.name}" for path in tmp_path.glob("*.json")]
        for source in sources:
            checkpoint = Checkpoint.open(source)
            assert_same(read_all(checkpoint), small_state())
            assert checkpoint.changed() == ""
            joined = join_source(source, checkpoint.manifest)
            assert_same(read_all(joined), small_state())
            checkpoint.close()
            assert_same(read_all(checkpoint), small_state())


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ["a b", "a+b", "a%20b", "a%2Bb", "mod\u00e8le"])
def test_keys_are_what_they_are(name: str, library: str, s3: Servers, tmp_path: Path) -> None:
    """A key with %20 is not the one with a space; in an address of the web it is."""
    state, other = {"weight": tensor(1, (4, 3))}, {"weight": tensor(2, (4, 3))}
    web = f"{s3[1].address}/{BUCKET}/{library}/{quote(name)}"
    with only(library):
        for file in ("model.safetensors", "my model.safetensors"):
            save_file(other, tmp_path / file)
            if unquote(name) != name:
                put(s3[0], tmp_path, f"{library}/{unquote(name)}")
            save_file(state, tmp_path / file)
            url = put(s3[0], tmp_path, f"{library}/{name}")
        for source in (url, f"{url}/model.safetensors", f"{url}/my model.safetensors"):
            assert_same(read_all(Checkpoint.open(source)), state)
        for source in (web, f"{web}/my%20model.safetensors?signature=a%2Fb"):
            assert_same(read_all(Checkpoint.open(source)), state)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("there", "source", "text"),
    [
        ("query", "query/model.safetensors?versionId=1", r"query/model.safetensors: in a URL, a # or \? begins"),
        ("run", "run?lr=1/model.safetensors", r"a # or \? begins"),
        ("run", "run?lr=1", r"a # or \? begins"),
        ("twice", "twice//model.safetensors", r"twice//model.safetensors: keys with // in them are not supported"),
        ("twice/x", "twice//x/", "keys with // in them"),
    ],
)
def test_urls_that_would_read_another_key(there: str, source: str, text: str, library: str, s3: Servers, tmp_path: Path) -> None:
    save_file(small_state(), tmp_path / "model.safetensors")
    put(s3[0], tmp_path, there)
    with only(library):
        must_raise(CheckpointError, text, Checkpoint.open, f"s3://{BUCKET}/{source}")


def test_requests_go_on_with_the_threads_there_are(s3: Servers, tmp_path: Path) -> None:
    folder_with_index(tmp_path, small_state())
    url, start, started = put(s3[0], tmp_path, "few threads"), threads.start, []

    def only_one(name: str, target: Any) -> Any:
        if name == "epload-get" and started:
            raise LoadError("cannot start thread")
        started.append(name)
        return start(name, target)

    with mock.patch.object(threads, "start", only_one):
        assert_same(read_all(Checkpoint.open(url)), small_state())
    assert started


@pytest.mark.parametrize("library", [*LIBRARIES, "web"])
def test_sets_of_weights(library: str, s3: Servers, tmp_path: Path) -> None:
    """The choice is that of local folders, also where names are asked for one by one."""
    states = [{"weight": tensor(number, (4, 3))} for number in range(4)]
    torch.save(states[0], tmp_path / "pytorch_model.bin")
    save_file(states[1], tmp_path / "model.fp16.safetensors")
    save_file(states[2], tmp_path / "adapter_model.safetensors")
    save_file(states[3], tmp_path / "diffusion_pytorch_model.ema.safetensors")
    url = put(s3[0], tmp_path, f"sets/{library}")
    if library == "web":
        url, library = f"{s3[1].address}/{BUCKET}/sets/web", LIBRARIES[0]
    with only(library):
        for number, variant in ((0, ""), (1, "fp16"), (3, "ema")):
            assert_same(read_all(Checkpoint.open(url, variant=variant)), states[number])
        must_raise(CheckpointError, "no weights of variant='x'", Checkpoint.open, url, variant="x")
        save_file(states[3], tmp_path / "diffusion_pytorch_model.safetensors")
        put(s3[0], tmp_path, url.partition(f"{BUCKET}/")[2])
        text = r"pytorch_model\.bin, diffusion_pytorch_model\.safetensors; pass the file"
        must_raise(CheckpointError, text, Checkpoint.open, url)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_signed_url(library: str, s3: Servers, tmp_path: Path) -> None:
    """The signature is that of GET."""
    save_file(small_state(), tmp_path / "model.safetensors")
    put(s3[0], tmp_path, f"signed/{library}")
    url = f"{s3[1].address}/{BUCKET}/signed/{library}/model.safetensors?signature=a%2Fb"
    s3[1].fault = lambda method, path, number: "403" if method == "HEAD" else ""
    with only(library):
        checkpoint = Checkpoint.open(url)
        assert_same(read_all(checkpoint), small_state())
        assert checkpoint.changed() == ""
        save_file({"x": torch.ones(3)}, tmp_path / "model.safetensors")
        put(s3[0], tmp_path, f"signed/{library}")
        assert "was replaced by another object" in checkpoint.changed()


@pytest.mark.parametrize("host", ["b.s3.amazonaws.com", "account.blob.core.windows.net", "a.r2.cloudflarestorage.com"])
def test_a_signed_url_of_a_known_host_keeps_its_signature(host: str) -> None:
    url = f"https://{host}/folder/x?signature=1"
    store = object_store.ObstoreClient(url)._store
    assert (type(store), store.url) == (HTTPStore, url)


def test_a_folder_that_may_not_be_listed(s3: Servers, tmp_path: Path) -> None:
    """S3 denies access to what is absent then."""
    folder_with_index(tmp_path, small_state())
    put(s3[0], tmp_path, "unlisted")
    url, there = f"{s3[1].address}/{BUCKET}/unlisted", {path.name for path in tmp_path.iterdir()}
    s3[1].fault = lambda method, path, number: "" if path.rpartition("/")[2] in there else "403"
    assert_same(read_all(Checkpoint.open(url)), small_state())
    there.clear()
    clean(must_raise(CheckpointError, r"cannot read http://.*/unlisted: access is denied \(403\)", Checkpoint.open, url))


def test_dcp_folders(s3: Servers, tmp_path: Path) -> None:
    ranks.run(2, save_all, tmp_path)
    for form in FORMATS:
        path = folder_of(tmp_path, "tp x fsdp", form)
        checkpoint = Checkpoint.open(put(s3[0], path, f"dcp/{form}"))
        assert_same(read_all(checkpoint), read_all(Checkpoint.open(path)))


def test_torch_files_are_opened_together(s3: Servers, tmp_path: Path) -> None:
    torch_folder_with_index(tmp_path, small_state())
    url, members, together = put(s3[0], tmp_path, "torch files"), torch_file._members, threading.Barrier(2, timeout=30)

    def wait(file: StoredFile) -> dict[int, int]:
        together.wait()
        return members(file)

    with mock.patch.object(torch_file, "_members", wait):
        checkpoint = Checkpoint.open(url)
    assert isinstance(checkpoint, FileCheckpoint)
    assert_same(read_all(checkpoint), small_state())


def test_any_pieces(s3: Servers, tmp_path: Path) -> None:
    state = {name: tensor(i, (5000,), torch.uint8) for i, name in enumerate("xyz")}
    save_file(state, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(put(s3[0], tmp_path, "pieces"))
    random = Random(1)
    for gap, size in ((0, 1000), (10, 77), (64 << 10, 8 << 20)):
        with mock.patch.multiple(object_store, _GAP_BYTES=gap, REQUEST_BYTES=size):
            pieces, expected = [], bytearray()
            for _ in range(40):
                number, begin = random.randrange(3), random.randrange(5000)
                nbytes = random.randint(1, min(300, 5000 - begin))
                pieces.append(Piece(number, begin, len(expected), nbytes))
                expected += raw_bytes(state[checkpoint.manifest.names[number]])[begin : begin + nbytes]
            bucket = torch.empty(len(expected), dtype=torch.uint8)
            checkpoint.fill(bucket, pieces)
            assert bytes(bucket.tolist()) == bytes(expected)


def test_chunks_are_fetched_together(s3: Servers, tmp_path: Path) -> None:
    state = {"x": tensor(1, (4, 700))}
    save_file(state, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(put(s3[0], tmp_path, "chunks"))
    for span, elements, within, sizes, reads in (
        (64 << 20, 1000, 0, [1000, 1000, 800], 1),
        (64 << 20, 500, 700, [500, 200] * 4, 1),
        (5000, 1000, 0, [1000, 1000, 800], 2),
        (100, 1000, 0, [1000, 1000, 800], 3),
    ):
        read = mock.patch.object(object_store.ObjectStore, "read", autospec=True, side_effect=object_store.ObjectStore.read)
        with mock.patch.object(base, "SPAN_BYTES", span), read as calls:
            chunks = list(base.read_in_chunks(checkpoint, 0, elements, within))
        assert ([len(chunk) for chunk in chunks], calls.call_count) == (sizes, reads)
        assert_same({"x": torch.cat(chunks).view(4, 700)}, state)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("fault", ["slow down", "truncate", "reset"])
def test_faults_that_pass(fault: str, library: str, s3: Servers, tmp_path: Path) -> None:
    state = {f"t{i}": tensor(i, (3000,)) for i in range(5)}
    save_file(state, tmp_path / "model.safetensors")
    url = put(s3[0], tmp_path, f"faults/{library}/{fault.replace(' ', '-')}")
    s3[1].fault = lambda method, path, number: fault if number % 2 and (method == "GET" or fault != "truncate") else ""
    s3[1].latency = 0.01
    with mock.patch.object(object_store, "REQUEST_BYTES", 20_000), only(library):
        checkpoint = Checkpoint.open(url)
        assert_same(read_all(checkpoint), state)
        assert checkpoint.changed() == ""
    assert s3[1].requests > 8


@pytest.mark.parametrize("library", LIBRARIES)
def test_faults_that_stay(library: str, s3: Servers, tmp_path: Path) -> None:
    save_file({"x": tensor(1, (3000,))}, tmp_path / "model.safetensors")
    url = put(s3[0], tmp_path, f"stay/{library}")
    with mock.patch.multiple(object_store, ATTEMPTS=2, BUSY_SECONDS=0.2), only(library):
        checkpoint = Checkpoint.open(url)
        for fault, attempts in (("503", r"\d+"), ("slow down", r"\d+"), ("500", 2), ("reset", 2)):
            s3[1].fault = lambda method, path, number, fault=fault: fault
            text = f"cannot read s3://.*: {attempts} attempts failed, the last: "
            clean(must_raise(CheckpointError, text, read_all, checkpoint))


@pytest.mark.parametrize(
    ("library", "fault"),
    [*product((*LIBRARIES, "web"), ("503", "slow down", "500")), ("obstore", "429"), ("web", "429")],  # s3fs does not tell 429
)
def test_a_busy_server_is_asked_more_often(library: str, fault: str, s3: Servers, tmp_path: Path) -> None:
    save_file({"x": tensor(1, (3000,))}, tmp_path / "model.safetensors")
    url = put(s3[0], tmp_path, f"busy/{library}/{fault.replace(' ', '-')}")
    if library == "web":
        url, library = url.replace("s3:/", s3[1].address), "fsspec"
    with mock.patch.multiple(object_store, ATTEMPTS=2, MAX_PAUSE=0.01), only(library):
        checkpoint = Checkpoint.open(url)
        first = s3[1].requests
        s3[1].fault = lambda method, path, number: fault if number < first + 12 else ""
        if fault == "500":
            must_raise(CheckpointError, "2 attempts failed", read_all, checkpoint)
        else:
            assert_same(read_all(checkpoint), {"x": tensor(1, (3000,))})


def clean(error: BaseException) -> None:
    """Neither the message nor what it came from shows a secret or an address with a signature."""
    text = str(error)
    assert SECRET not in text
    assert "Signature" not in text
    assert len(text.splitlines()) == 1
    assert error.__cause__ is None or isinstance(error.__cause__, OSError)
    assert error.__suppress_context__ or error.__context__ is None


def test_a_replaced_object(s3: Servers, tmp_path: Path) -> None:
    """It has the same size and header. The server refuses it by its ETag, before a byte of it is used."""
    for library in LIBRARIES:
        with only(library):
            save_file({"x": tensor(1, (3000,))}, tmp_path / "model.safetensors")
            url = put(s3[0], tmp_path, f"replaced/{library}")
            checkpoint = Checkpoint.open(url)
            read_all(checkpoint)
            save_file({"x": tensor(2, (3000,))}, tmp_path / "model.safetensors")
            put(s3[0], tmp_path, f"replaced/{library}")
            assert "was replaced by another object" in checkpoint.changed()
            if library == "obstore":
                text = "was replaced by another object while it was read; load again"
                must_raise(CheckpointError, text, read_all, checkpoint)
            must_raise(CheckpointError, "was replaced by .* after it was opened", checkpoint.reopen)
            text = "is not the file that the source rank has"
            must_raise(CheckpointError, text, join_source, url, checkpoint.manifest)
            s3[0].request("DELETE", f"/{BUCKET}/replaced/{library}/model.safetensors")
            assert checkpoint.changed().endswith("was removed")
            must_raise(CheckpointError, "was removed after it was opened", read_all, checkpoint)


def test_two_objects_of_one_size_and_time(s3: Servers, tmp_path: Path) -> None:
    """A server that makes ETags of times and sizes gives both the same, and their tensors are in another order."""
    state, path = {"a": tensor(1, (4, 3)), "b": tensor(2, (4, 3))}, tmp_path / "model.safetensors"
    save_file(state, path)
    urls = [put(s3[0], tmp_path, "same/0")]
    path.write_bytes(path.read_bytes().replace(b'"a"', b'"c"').replace(b'"b"', b'"a"').replace(b'"c"', b'"b"'))
    urls.append(put(s3[0], tmp_path, "same/1"))
    with mock.patch.object(object_store, "_version", lambda meta: (meta["size"], "time and size")), only("obstore"):
        first = Checkpoint.open(urls[0])
        assert_same(read_all(first), state)
        assert_same(read_all(Checkpoint.open(urls[1], known=first.manifest)), {"a": state["b"], "b": state["a"]})


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("hidden", [{"etag"}, {"etag", "last-modified"}], ids=len)
def test_a_replaced_object_without_an_etag(hidden: set[str], library: str, s3: Servers, tmp_path: Path) -> None:
    """It has the same size and header. The time of its last change has full seconds."""
    save_file({"x": tensor(1, (3000,))}, tmp_path / "model.safetensors")
    prefix = f"no-etag/{library}/{len(hidden)}"
    put(s3[0], tmp_path, prefix)
    url = f"{s3[1].address}/{BUCKET}/{prefix}"
    s3[1].hidden |= hidden
    with only(library):
        checkpoint = Checkpoint.open(url)
        read_all(checkpoint)
        assert checkpoint.changed() == ""
        read_all(join_source(url, checkpoint.manifest))
        time.sleep(1.1)
        save_file({"x": tensor(2, (3000,))}, tmp_path / "model.safetensors")
        put(s3[0], tmp_path, prefix)
        assert ("was replaced" in checkpoint.changed()) == ("last-modified" not in hidden)
        part = "content" if "last-modified" in hidden else "header"
        must_raise(CheckpointError, f"source rank has: its {part} differs", join_source, url, checkpoint.manifest)


@pytest.mark.parametrize("key", ["ETag", "Last-Modified", "LastModified", "mtime", "modificationTime"])
def test_what_tells_versions_with_fsspec(key: str, tmp_path: Path) -> None:
    client = object_store.FsspecClient(f"file://{tmp_path}")
    with mock.patch.object(client._fs, "info", return_value={"size": 3, key: 1234}):
        assert client.head("x") == (3, "1234")


def test_what_is_not_there(s3: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects, and then clients. What the environment says of a client counts, too."""
    monkeypatch.setenv("AWS_READ_TIMEOUT", "7s")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "ON")
    options = object_store._client_options("s3")
    assert (options["allow_http"], options["read_timeout"], options["connect_timeout"]) == ("ON", "7s", "10s")
    assert "allow_http" not in object_store._client_options("gs")
    for library in LIBRARIES:
        with only(library):
            for name, text in (
                ("nothing", r"no checkpoint in s3://weights/nothing: expected \*\.safetensors"),
                ("no.safetensors", r"cannot read s3://weights/no\.safetensors: no such object"),
            ):
                must_raise(CheckpointError, text, Checkpoint.open, f"s3://{BUCKET}/{name}")
    must_raise(CheckpointError, "cannot open nope://a/b: .*Fsspec", Checkpoint.open, "nope://a/b")
    for name in ("obstore", "obstore.store", "fsspec", "fsspec.core"):
        monkeypatch.setitem(sys.modules, name, None)
    for url, extra in (("s3://a/b", "s3"), ("gs://a/b", "gs"), ("https://a/b", "http"), ("oss://a/b", "fsspec")):
        text = rf"no client for .* is installed .*pip install epload\[{extra}\]"
        must_raise(CheckpointError, text, Checkpoint.open, url)


@pytest.mark.parametrize("key", ["odd/1//x", "odd/2/../x", "odd/3/./x"])
def test_a_key_that_obstore_does_not_list(key: str, s3: Servers, tmp_path: Path) -> None:
    folder_with_index(tmp_path, small_state())
    url = put(s3[0], tmp_path, key[:5])
    s3[0].request("PUT", f"/{BUCKET}/{key}", b"x")
    with only("obstore"):
        text = f"cannot read {url}: obstore does not list .*pass the file or the index"
        clean(must_raise(CheckpointError, text, Checkpoint.open, url))
        assert s3[1].requests == 1
        assert_same(read_all(Checkpoint.open(f"{url}/model.safetensors.index.json")), small_state())
    with only("fsspec"):
        assert_same(read_all(Checkpoint.open(url)), small_state())


@pytest.mark.parametrize("fault", ["403", "429", "reset"])
def test_no_credentials(fault: str, s3: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", s3[1].address)
    s3[1].fault = lambda method, path, number: fault
    with only("obstore"), mock.patch.object(object_store, "ATTEMPTS", 2):
        text = "2 attempts failed, the last: no credentials are in the environment"
        clean(must_raise(CheckpointError, text, Checkpoint.open, f"s3://{BUCKET}/none"))


def test_a_bucket_in_another_region(s3: Servers) -> None:
    s3[1].fault = lambda method, path, number: "301"
    for source in (f"s3://{BUCKET}/a", f"s3://{BUCKET}/a/model.safetensors"):
        before = s3[1].requests
        clean(must_raise(CheckpointError, "in another region; set AWS_REGION to it", Checkpoint.open, source))
        assert s3[1].requests == before + 1


def test_a_certificate_that_does_not_verify(tmp_path: Path) -> None:
    save_file({"x": torch.ones(3)}, tmp_path / "model.safetensors")
    with untrusted(tmp_path, tmp_path) as address:
        for source in (f"{address}/model.safetensors", address):
            text = "its certificate is not valid for it, or not signed by"
            clean(must_raise(CheckpointError, text, Checkpoint.open, source))


def _load(rank: int, address: str, url: str, all_readers: tuple[str, ...], turns: tuple[str, ...]) -> list[str]:
    os.environ.update(s3_server.environment(address))
    object_store.FIRST_PAUSE = 0.02
    problems, options = [], {"bucket_bytes": 2000, "progress": False}
    for readers in all_readers:
        model = meta_net()
        with HierarchicalLoader(Topology.from_nodes(NODES), readers=readers, **options) as loader:
            for turn in turns:
                report = loader.load(model, f"{url}/{readers}")
                problems += [f"{readers}, {turn}: {text}" for text in wrong(model, state_for(1))]
                if readers == "auto" and (report.readers, report.reason[:13]) != ("every", "auto -> every"):
                    problems.append(f"{report.readers}, {report.reason}")
    return problems


def now_and_then(seed: int) -> s3_server.Fault:
    """Returns a fault for one request in ten, so that all seven attempts of one fail in one of ten million."""
    random = Random(seed)
    return lambda method, path, number: random.choice([*[""] * 18, "503", "reset"])


def test_loads_and_the_bytes_of_a_job(s3: Servers, tmp_path: Path) -> None:
    """2 x 2 ranks read once in the job, or once a node, and one rank alone the header; then in spite of requests that fail."""
    path = tmp_path / "model.safetensors"
    save_file(state_for(1), path)
    for readers in ("partitioned", "per_node", "auto"):
        put(s3[0], tmp_path, f"load/{readers}")
    url, times = f"s3://{BUCKET}/load", {"partitioned": 1, "per_node": 2}
    all_fine(ranks.run(4, _load, s3[1].address, url, (*times,), ("from meta",)))
    size, header = path.stat().st_size, 8 + int.from_bytes(path.read_bytes()[:8], "little")
    for readers, count in times.items():
        sent = s3[1].sent[f"/{BUCKET}/load/{readers}/model.safetensors"]
        assert sum(end - begin for begin, end in sent) == min(size, 1 << 20) + count * (size - header)
    s3[1].fault = now_and_then(1)
    all_fine(ranks.run(4, _load, s3[1].address, url, ("auto", "partitioned"), ("from meta", "again")))


def _replaced_meanwhile(rank: int, address: str, url: str, port: int, folder: str) -> list[str]:
    os.environ.update(s3_server.environment(address))
    fetch = object_store.ObjectFile.fetch

    def slow(self: object_store.ObjectFile, begin: int, end: int) -> memoryview:
        found = fetch(self, begin, end)
        if rank == 0 and begin > 1000:
            moto = Moto.__new__(Moto)
            moto.port = port
            moto.put_folder(Path(folder), url.removeprefix(f"s3://{BUCKET}/"))
        return found

    loader = HierarchicalLoader(Topology.from_nodes(NODES), readers="partitioned", bucket_bytes=500, progress=False)
    with mock.patch.object(object_store.ObjectFile, "fetch", slow):
        return not_refused(lambda: loader.load(meta_net(), url), "was replaced by another object")


def test_an_object_replaced_during_the_load(s3: Servers, tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        save_file(state_for(number), tmp_path / str(number) / "model.safetensors")
    url = put(s3[0], tmp_path / "1", "meanwhile")
    all_fine(ranks.run(4, _replaced_meanwhile, s3[1].address, url, s3[0].port, str(tmp_path / "2")))
