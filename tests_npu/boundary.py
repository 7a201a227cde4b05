"""One process: calls libepload_npu's C functions where torch_npu throws, on a stream that it did not make. Prints what each
function returned and said."""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path

import torch
import torch_npu  # noqa: F401  (brings the device)

import epload


class Copy(ctypes.Structure):
    _fields_ = (("to", ctypes.c_void_p), ("source", ctypes.c_void_p), ("nbytes", ctypes.c_uint64))


def main() -> None:
    torch.npu.set_device(0)
    there = torch.arange(64, dtype=torch.uint8).to("npu:0")
    torch.npu.synchronize()
    library = ctypes.CDLL(str(Path(epload.__file__).parent / "libepload_npu.so"))
    error = ctypes.create_string_buffer(1024)
    copies = (Copy * 1)(Copy(there.data_ptr() + 32, there.data_ptr(), 32))
    external = torch.npu.ExternalStream(torch.npu.Stream().npu_stream)
    said: dict[str, tuple[int, str]] = {}

    def call(what: str, count: int) -> None:
        error.value = b""
        said[what] = library.epload_npu_copy(copies, ctypes.c_uint64(count), error), error.value.decode()

    call("torch_npu's stream", 1)
    torch.npu.synchronize()
    moved = there.cpu()[32:].tolist() == list(range(32))
    torch.npu.set_stream(external)
    call("another stream", 1)
    print(json.dumps({"said": said, "moved": moved}), flush=True)
    os._exit(0)  # torch_npu's end asks for more of CANN than there is here


if __name__ == "__main__":
    main()
