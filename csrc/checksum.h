// A checksum fast enough for every byte that is loaded.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace epload {

// CRC-32C (Castagnoli) in four lanes that take the 8-byte words of the stream in turn, since one CRC is a chain of
// dependent steps; the lanes, the remaining bytes and the length are then mixed to 64 bits. The same on all machines,
// with or without the CRC instruction, and however the stream is cut. A change of up to 32 consecutive bits is always
// detected, other changes with probability 1 - 2^-32. Never 0.
class Checksum {
 public:
  // `portable`: without the instruction, for tests.
  explicit Checksum(bool portable = false);
  void update(const void* bytes, size_t nbytes);
  [[nodiscard]] uint64_t value() const;

  static constexpr size_t kLanes = 4;
  using Lanes = std::array<uint32_t, kLanes>;

 private:
  static constexpr size_t kBlock = 8 * kLanes;

  void (*blocks_)(Lanes&, const unsigned char*, size_t);
  Lanes lanes_;
  std::array<unsigned char, kBlock> rest_{}; // bytes of an incomplete block
  size_t rest_bytes_ = 0;
  uint64_t nbytes_ = 0;
};

} // namespace epload
