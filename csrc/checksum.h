// A checksum of a bucket, fast enough to be taken of every byte that is loaded.
#pragma once

#include <cstddef>
#include <cstdint>

namespace epload {

// CRC-32C (Castagnoli) of four equal lanes of the bytes, taken side by side since one CRC is a chain of dependent
// steps, and what is left over added to the last; the four are then mixed to 64 bits. Equal on all machines, with or
// without an instruction for it. Any change of up to 32 bits in a row is found; others go unnoticed once in 2^32.
uint64_t checksum(const unsigned char* bytes, size_t nbytes);

// The same without the instruction, for machines that lack it and for tests.
uint64_t checksum_portable(const unsigned char* bytes, size_t nbytes);

} // namespace epload
