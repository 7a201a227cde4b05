"""Times reading one object over HTTP from nginx on this machine: epload's byte store against the same client's own parallel GETs.

    python benchmarks/bench_objects.py --nginx /usr/sbin/nginx

One process reads all tensors of a safetensors file, in buckets of 64 MiB into one buffer, with each client. "GETs" are requests
of one size by some threads into the same buffer, without epload; the best of all sizes and numbers of threads counts. Entries
run in turn; the bytes of each run are compared with the file.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor

from epload import Checkpoint, Piece
from epload.checkpoint import object_store
from epload.checkpoint.object_store import Client, FsspecClient, ObstoreClient, connect

BUCKET = 64 << 20
FILE = "model.safetensors"


@contextmanager
def nginx(program: str, folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = folder / "nginx.conf"
    temporary = "".join(f"{name}_temp_path {folder};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    config.write_text(
        f"daemon off; worker_processes 2; pid {folder}/pid; error_log {folder}/errors; events {{}}\n"
        f"http {{ access_log off; sendfile on; {temporary}\n"
        f"server {{ listen 127.0.0.1:{port}; root {folder}; }} }}\n"
    )
    process = subprocess.Popen([program, "-c", str(config), "-e", str(folder / "errors")])
    sleep(0.5)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def using(kind: type[Client]) -> Iterator[None]:
    known = {} if kind is FsspecClient else dict(object_store._OBSTORE)
    with mock.patch.dict(object_store._OBSTORE, known, clear=True):
        yield


def epload_reads(url: str, kind: type[Client], buffer: Tensor) -> None:
    with using(kind):
        checkpoint = Checkpoint.open(f"{url}/{FILE}")
        sizes, at, pieces = checkpoint.manifest.nbytes_of(), 0, []
        for number, nbytes in enumerate(sizes):
            if pieces and at + nbytes - pieces[0].bucket_offset > BUCKET:
                fill(checkpoint, buffer, pieces)
                pieces = []
            pieces.append(Piece(number, 0, at, nbytes))
            at += nbytes
        fill(checkpoint, buffer, pieces)
        checkpoint.close()


def fill(checkpoint: Checkpoint, buffer: Tensor, pieces: list[Piece]) -> None:
    base = pieces[0].bucket_offset
    checkpoint.fill(buffer[base:], [piece._replace(bucket_offset=piece.bucket_offset - base) for piece in pieces])


def plain_gets(url: str, kind: type[Client], buffer: Tensor, size: int, threads: int) -> None:
    with using(kind):
        client = connect(url)
    version = client.head(FILE)
    into = memoryview(buffer.numpy())
    first = version[0] - buffer.numel()

    def get(begin: int) -> None:
        end = min(begin + size, version[0])
        into[begin - first : end - first] = memoryview(client.get(FILE, begin, end, version))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(get, range(first, version[0], size)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nginx", default="nginx", help="the program")
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="epload-bench-") as temporary:
        folder = Path(temporary)
        count = options.megabytes * 2
        values = {f"t{i:05}": torch.randint(0, 255, (500_000,), dtype=torch.uint8) for i in range(count)}
        save_file(values, folder / FILE)
        expected = torch.cat(list(values.values()))
        buffer = torch.empty_like(expected)
        folder.chmod(0o755)  # nginx may serve as another user
        (folder / FILE).chmod(0o644)
        with nginx(options.nginx, folder) as url:
            entries: dict[str, Callable[[], None]] = {}
            for kind in (ObstoreClient, FsspecClient):
                entries[f"{kind.__name__} epload"] = partial(epload_reads, url, kind, buffer)
                for size in (2, 8, 32):
                    for threads in (4, 16):
                        gets = partial(plain_gets, url, kind, buffer, size << 20, threads)
                        entries[f"{kind.__name__} GETs of {size} MiB by {threads} threads"] = gets
            seconds: dict[str, list[float]] = {name: [] for name in entries}
            for turn in range(options.repeat + 1):
                for name, read in entries.items():
                    buffer.zero_()
                    began = perf_counter()
                    read()
                    if turn:  # the first warms up
                        seconds[name].append(perf_counter() - began)
                    assert torch.equal(buffer, expected), name
        report(seconds, expected.numel())


def report(seconds: dict[str, list[float]], nbytes: int) -> None:
    rates = {name: nbytes / 1e9 / statistics.median(each) for name, each in seconds.items()}
    for name, rate in rates.items():
        print(f"{name:<48}{rate:6.2f} GB/s")
    for kind in ("ObstoreClient", "FsspecClient"):
        best = max(rate for name, rate in rates.items() if name.startswith(f"{kind} GETs"))
        print(f"{kind}: epload over the best GETs {rates[f'{kind} epload'] / best:.2f}")


if __name__ == "__main__":
    main()
