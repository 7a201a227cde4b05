"""Reads the memory instructions out of a cubin, since nvcc can come without a disassembler."""

from __future__ import annotations

import struct

# Volta and later: 16 bytes an instruction, the opcode in its lowest 12 bits, the width of an access in bits 73 to 75.
# Checked against nvdisasm 13.0 for sm_80 and sm_90.
_OPCODES = {
    0x381: "LDG", 0x981: "LDG", 0x386: "STG", 0x986: "STG",
    0x383: "LDL", 0x983: "LDL", 0x387: "STL", 0x987: "STL",
    0x380: "LD", 0x980: "LD", 0x385: "ST", 0x985: "ST",
}  # fmt: skip
_BITS = {0: 8, 1: 8, 2: 16, 3: 16, 4: 32, 5: 64, 6: 128}


def memory_instructions(cubin: bytes) -> dict[str, list[str]]:
    """Of each kernel its memory instructions in order: ``LDG.128`` reads 16 bytes of global memory, ``STL.32`` spills."""
    return {
        name.removeprefix(".text."): list(_decode(code))
        for name, code in _sections(cubin).items()
        if name.startswith(".text.")
    }


def _decode(code: bytes) -> list[str]:
    found = []
    for low, high in struct.iter_unpack("<QQ", code):
        if name := _OPCODES.get(low & 0xFFF):
            found.append(f"{name}.{_BITS[(high >> 9) & 7]}")
    return found


def _sections(elf: bytes) -> dict[str, bytes]:
    """Name and content of each section of a 64-bit little-endian ELF file."""
    assert elf[:6] == b"\x7fELF\x02\x01"
    (offset,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    # sh_name, sh_type, sh_flags, sh_addr, sh_offset, sh_size
    headers = [struct.unpack_from("<IIQQQQ", elf, offset + i * size) for i in range(count)]
    table = headers[names][4]
    return {
        elf[table + h[0] : elf.index(b"\0", table + h[0])].decode(): elf[h[4] : h[4] + h[5]]
        for h in headers
        if h[1] == 1  # SHT_PROGBITS
    }
