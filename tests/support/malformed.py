"""Random malformed headers and files, as hypothesis strategies."""

from __future__ import annotations

from hypothesis import strategies as st

from epload.core.dtypes import SAFETENSORS
from support.checkpoints import entry, framed, header

FUZZED = header(
    data=40, __metadata__={"format": "pt"}, v=entry(), w=entry(shape=[2, 3], offsets=[16, 40]), e=entry([0], [40, 40])
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(list(SAFETENSORS)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(list(SAFETENSORS)) | JSON_VALUES,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | JSON_VALUES,
        "data_offsets": st.lists(st.integers(-1, 50), min_size=2, max_size=2) | JSON_VALUES,
    }
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    raw = bytearray(FUZZED)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(raw)))
        end = min(len(raw), at + draw(st.integers(0, 3)))
        raw[at:end] = draw(st.binary(max_size=3) | st.sampled_from([b"0", b"-", b"9" * 30, b"[", b"{", b'"', b",", b"e9"]))
    return bytes(raw)


FILES = st.one_of(
    mutated(),
    st.binary(max_size=64),
    st.binary(max_size=64).map(framed),
    st.dictionaries(st.text(max_size=3), ENTRIES | JSON_VALUES, max_size=3).map(lambda made: header(40, **made)),
)
