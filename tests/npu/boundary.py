"""One process: calls a C function of libepload_npu where torch_npu throws, in a thread that cannot learn its device, and one with
storages that torch_npu did not make. Prints what they returned and the error message."""

from __future__ import annotations

import ctypes
import json
import os
import threading
from pathlib import Path

import torch
import torch_npu  # noqa: F401  (brings the device)

import epload

NO_DEVICE = 507000
"""An error of CANN's runtime."""


class Copy(ctypes.Structure):
    _fields_ = (("to", ctypes.c_void_p), ("source", ctypes.c_void_p), ("nbytes", ctypes.c_uint64))


def main() -> None:
    torch.npu.set_device(0)
    there = torch.arange(64, dtype=torch.uint8).to("npu:0")
    torch.npu.synchronize()
    library = ctypes.CDLL(str(Path(epload.__file__).parent / "libepload_npu.so"))
    library.epload_npu_plain.restype, library.epload_npu_plain.argtypes = ctypes.c_bool, (ctypes.c_void_p,)
    others = [torch.arange(1000 + i) for i in range(50)]
    plain = [library.epload_npu_plain(other.untyped_storage()._cdata) for other in others]
    error = ctypes.create_string_buffer(1024)
    copies = (Copy * 1)(Copy(there.data_ptr() + 32, there.data_ptr(), 32))
    ctypes.CDLL("libascendcl.so").fakecann_fail_get_device(NO_DEVICE)
    outcomes: dict[str, tuple[int, str]] = {}

    def call(what: str, count: int) -> None:
        error.value = b""
        outcomes[what] = library.epload_npu_copy(copies, ctypes.c_uint64(count), error), error.value.decode()

    call("here", 1)
    torch.npu.synchronize()
    moved = there.cpu()[32:].tolist() == list(range(32))
    thread = threading.Thread(target=call, args=("in a new thread", 1))
    thread.start()
    thread.join()
    print(json.dumps({"outcomes": outcomes, "moved": moved, "plain": all(plain)}), flush=True)
    os._exit(0)  # torch_npu's end asks for more of CANN than there is here


if __name__ == "__main__":
    main()
