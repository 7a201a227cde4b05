#include "checksum.h"

#include <array>
#include <cstring>

#if defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace epload {
namespace {

constexpr size_t kLanes = 4;
using Lanes = std::array<uint32_t, kLanes>;

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0);
    }
    table[i] = crc;
  }
  return table;
}
constexpr auto kTable = make_table();

struct Portable {
  static uint32_t byte(uint32_t crc, unsigned char value) {
    return (crc >> 8) ^ kTable[(crc ^ value) & 0xff];
  }
  static uint32_t word(uint32_t crc, uint64_t value) {
    for (int i = 0; i < 8; ++i) {
      crc = byte(crc, static_cast<unsigned char>(value >> (8 * i)));
    }
    return crc;
  }
};

uint64_t mix(const Lanes& lanes, size_t nbytes) {
  uint64_t h = nbytes;
  for (const auto lane : lanes) {
    h = (h ^ lane) * 0x9e3779b97f4a7c15u; // odd, so that no two values of a lane become one
    h ^= h >> 32;
  }
  return h;
}

// Little-endian machines only, as are all that torch runs on.
template <class Crc>
uint64_t run(const unsigned char* bytes, size_t nbytes) {
  const size_t words = nbytes / (8 * kLanes); // of each lane
  Lanes lanes;
  lanes.fill(0xffffffffu);
  for (size_t i = 0; i < words; ++i) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      uint64_t value = 0;
      std::memcpy(&value, bytes + (lane * words + i) * 8, 8);
      lanes[lane] = Crc::word(lanes[lane], value);
    }
  }
  for (size_t i = words * 8 * kLanes; i < nbytes; ++i) {
    lanes.back() = Crc::byte(lanes.back(), bytes[i]);
  }
  return mix(lanes, nbytes);
}

#if defined(__x86_64__)
// Not the compiler's intrinsics, which it inlines only into code that is built for nothing older.
struct Instruction {
  static uint32_t byte(uint32_t crc, unsigned char value) {
    asm("crc32b %1, %0" : "+r"(crc) : "rm"(value));
    return crc;
  }
  static uint32_t word(uint32_t crc, uint64_t value) {
    uint64_t wide = crc;
    asm("crc32q %1, %0" : "+r"(wide) : "rm"(value));
    return static_cast<uint32_t>(wide);
  }
};
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
struct Instruction {
  static uint32_t byte(uint32_t crc, unsigned char value) {
    return __crc32cb(crc, value);
  }
  static uint32_t word(uint32_t crc, uint64_t value) {
    return __crc32cd(crc, value);
  }
};
#endif

} // namespace

uint64_t checksum_portable(const unsigned char* bytes, size_t nbytes) {
  return run<Portable>(bytes, nbytes);
}

uint64_t checksum(const unsigned char* bytes, size_t nbytes) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  return has_instruction ? run<Instruction>(bytes, nbytes) : checksum_portable(bytes, nbytes);
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
  return run<Instruction>(bytes, nbytes);
#else
  return checksum_portable(bytes, nbytes);
#endif
}

} // namespace epload
