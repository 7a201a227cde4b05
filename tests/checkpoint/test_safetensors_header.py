"""Headers in the form that writers give them are parsed natively. Whatever that accepts, and only that, the parser for all others
accepts too, with the same result."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, replace
from math import prod
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epload.checkpoint import safetensors
from epload.checkpoint.manifest import FileLayout
from epload.core.dtypes import SAFETENSORS
from epload.errors import CheckpointError

MANY = settings(max_examples=400, deadline=None, database=None)
NAMES = st.text("abz.0_ /-", min_size=1, max_size=12) | st.text(max_size=4)


@dataclass
class InMemory:
    """A file, as far as reading its header asks for one."""

    content: bytes
    total: int

    @property
    def nbytes(self) -> int:
        return self.total

    def read(self, offset: int, nbytes: int) -> bytes:
        return self.content[offset : offset + nbytes]

    def __str__(self) -> str:
        return "a file"


def outcome(header: bytes, data: int) -> FileLayout | str:
    """``data``: bytes behind the header."""
    content = struct.pack("<Q", len(header)) + header
    try:
        layout = safetensors.read_layout(InMemory(content, len(content) + data))  # type: ignore[arg-type]
    except CheckpointError as error:
        return str(error)
    return replace(layout, order=list(layout.order))


def both(header: bytes, data: int) -> tuple[FileLayout | str, FileLayout | str]:
    with mock.patch.object(safetensors, "_plain_layout", return_value=None):
        other = outcome(header, data)
    return outcome(header, data), other


@st.composite
def headers(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """Entries one after the other, sometimes in another order than their bytes, and the bytes behind the header."""
    at, entries = 0, []
    for name in draw(st.lists(NAMES, max_size=6, unique=True)):
        dtype = draw(st.sampled_from(sorted(SAFETENSORS)))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        nbytes = prod(shape) * SAFETENSORS[dtype].itemsize
        pairs = [("dtype", dtype), ("shape", shape), ("data_offsets", [at, at + nbytes])]
        entries.append((name, dict(draw(st.permutations(pairs)))))
        at += nbytes
    if draw(st.booleans()):
        entries = draw(st.permutations(entries))
    found = dict(entries)
    if draw(st.booleans()):
        found["__metadata__"] = draw(st.dictionaries(st.text(max_size=5), st.text(max_size=9), max_size=3))
    return found, at


STYLES: list[dict[str, Any]] = [
    {}, {"separators": (",", ":")}, {"indent": 2}, {"ensure_ascii": False}, {"sort_keys": True, "separators": (",", ":")},
]  # fmt: skip


@MANY
@given(headers(), st.sampled_from(STYLES), st.integers(0, 9))
def test_what_writers_write(made: tuple[dict[str, Any], int], style: dict[str, Any], padding: int) -> None:
    entries, data = made
    fast, slow = both(json.dumps(entries, **style).encode(errors="surrogatepass") + b" " * padding, data)
    assert fast == slow


@MANY
@given(headers(), st.sampled_from(STYLES[:2]), st.data())
def test_what_is_wrong_is_left_to_the_other(made: tuple[dict[str, Any], int], style: dict[str, Any], data: Any) -> None:
    entries, nbytes = made
    header = bytearray(json.dumps(entries, **style).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(0, len(header) - 1)))
        what = data.draw(st.sampled_from(("replace", "insert", "remove")))
        byte = data.draw(st.sampled_from(list(b'{}[]",: 0123456789.-e\\') + [0, 127, 255, ord("a")]))
        header[at : at + (what != "insert")] = b"" if what == "remove" else bytes([byte])
    fast, slow = both(bytes(header), nbytes + data.draw(st.integers(-2, 2)))
    assert fast == slow


ENTRY = '{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ("{}", 0), ("{}", 3), ("", 0), ("[]", 0), (f'{{"a":{ENTRY}}}', 2), (f'{{"a":{ENTRY}}}', 3), (f'{{"a":{ENTRY},}}', 2),
        (f'{{"a":{ENTRY},"a":{ENTRY}}}', 2), (f'{{"a":{ENTRY}}}x', 2), (f'{{"a":{ENTRY[:-1]},"extra":1}}}}', 2),
        (f'{{"a":{ENTRY[:-1]},"dtype":"U8"}}}}', 2), (f'{{"a":{ENTRY.replace("2]", "02]", 1)}}}', 2),
        (f'{{"a":{ENTRY.replace("[2]", "[2.0]")}}}', 2), (f'{{"a":{ENTRY.replace("[2]", "[2,]")}}}', 2),
        (f'{{"a":{ENTRY.replace("[2]", "[-2]")}}}', 2), (f'{{"a":{ENTRY.replace("[2]", "[" + "9" * 40 + "]")}}}', 2),
        (f'{{"a":{ENTRY.replace("[2]", "[9223372036854775807,0]")}}}', 2), (f'{{"a":{ENTRY.replace("U8", "Q8")}}}', 2),
        (f'{{"a":{ENTRY.replace("[2]", "[" + "1," * 64 + "2]")}}}', 2), (f'{{"a":{ENTRY.replace("[0,2]", "[0,2,2]")}}}', 2),
        (f'{{"__metadata__":{{"a":"b"}},"a":{ENTRY}}}', 2), (f'{{"__metadata__":{{"a":1}},"a":{ENTRY}}}', 2),
        (f'{{"__metadata__":{{"a":"b","a":"c"}},"a":{ENTRY}}}', 2), (f'{{"__metadata__":{{"a":"\x01"}},"a":{ENTRY}}}', 2),
        (f'{{"__metadata__":{{"a":"b"}},"__metadata__":{{}},"a":{ENTRY}}}', 2), (f'{{"__metadata__":null,"a":{ENTRY}}}', 2),
        (f'{{"\\u0061":{ENTRY}}}', 2), (f'{{"é":{ENTRY}}}', 2), (f'\ufeff{{"a":{ENTRY}}}', 2),
    ],
)  # fmt: skip
def test_edges(header: str, data: int) -> None:
    fast, slow = both(header.encode(), data)
    assert fast == slow


def test_large_headers_are_parsed_natively() -> None:
    entries = {f"w.{i}": {"dtype": "BF16", "shape": [3, 5], "data_offsets": [30 * i, 30 * i + 30]} for i in range(500)}
    for style in STYLES:
        with mock.patch.object(safetensors.json, "loads", side_effect=AssertionError("parsed in Python")):
            found = outcome(json.dumps(entries, **style).encode(), 15_000)
        assert isinstance(found, FileLayout)
        assert found.names == (sorted(entries) if style.get("sort_keys") else list(entries))
        assert [found.names[i] for i in found.order] == list(entries)


def test_tensors_in_the_order_of_their_bytes_are_not_sorted() -> None:
    entry = {"dtype": "U8", "shape": [2]}
    for order in ([0, 1, 2], [2, 0, 1]):
        entries = {f"{i}": {**entry, "data_offsets": [2 * i, 2 * i + 2]} for i in order}
        header = json.dumps(entries).encode()
        content = struct.pack("<Q", len(header)) + header
        layout = safetensors.read_layout(InMemory(content, len(content) + 6))  # type: ignore[arg-type]
        assert (layout.order == range(3)) == (order == [0, 1, 2])
        assert [layout.names[i] for i in layout.order] == ["0", "1", "2"]
