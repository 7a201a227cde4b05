#include "checksum.h"

#include <algorithm>
#include <cstring>

#if defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace epload {
namespace {

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

uint32_t word_portable(uint32_t crc, uint64_t value) {
  for (int i = 0; i < 8; ++i) {
    crc = (crc >> 8) ^ kTable[(crc ^ static_cast<unsigned char>(value >> (8 * i))) & 0xff];
  }
  return crc;
}

#if defined(__x86_64__)
// Not the compiler's intrinsic, which it inlines only into code that is built for nothing older.
uint32_t word_instruction(uint32_t crc, uint64_t value) {
  uint64_t wide = crc;
  asm("crc32q %1, %0" : "+r"(wide) : "rm"(value));
  return static_cast<uint32_t>(wide);
}
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
uint32_t word_instruction(uint32_t crc, uint64_t value) {
  return __crc32cd(crc, value);
}
#endif

// Little-endian machines only, as are all that torch runs on.
template <uint32_t (*kWord)(uint32_t, uint64_t)>
void blocks(Checksum::Lanes& lanes, const unsigned char* bytes, size_t count) {
  auto mine = lanes; // in registers
  for (; count > 0; --count, bytes += 8 * Checksum::kLanes) {
    for (size_t lane = 0; lane < Checksum::kLanes; ++lane) {
      uint64_t value = 0;
      std::memcpy(&value, bytes + 8 * lane, 8);
      mine[lane] = kWord(mine[lane], value);
    }
  }
  lanes = mine;
}

auto fastest(bool portable) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  return has_instruction && !portable ? blocks<word_instruction> : blocks<word_portable>;
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
  return portable ? blocks<word_portable> : blocks<word_instruction>;
#else
  return blocks<word_portable>;
#endif
}

} // namespace

Checksum::Checksum(bool portable) : blocks_(fastest(portable)) {
  lanes_.fill(0xffffffffu);
}

void Checksum::update(const void* bytes, size_t nbytes) {
  const auto* at = static_cast<const unsigned char*>(bytes);
  nbytes_ += nbytes;
  if (rest_bytes_ > 0) {
    const size_t taken = std::min(nbytes, kBlock - rest_bytes_);
    std::memcpy(rest_.data() + rest_bytes_, at, taken);
    rest_bytes_ += taken;
    at += taken;
    nbytes -= taken;
    if (rest_bytes_ < kBlock) {
      return;
    }
    blocks_(lanes_, rest_.data(), 1);
    rest_bytes_ = 0;
  }
  blocks_(lanes_, at, nbytes / kBlock);
  at += nbytes / kBlock * kBlock;
  rest_bytes_ = nbytes % kBlock;
  if (rest_bytes_ > 0) {
    std::memcpy(rest_.data(), at, rest_bytes_);
  }
}

uint64_t Checksum::value() const {
  auto lanes = lanes_;
  if (rest_bytes_ > 0) {
    std::array<unsigned char, kBlock> block{};
    std::copy_n(rest_.begin(), rest_bytes_, block.begin());
    blocks_(lanes, block.data(), 1); // the length tells its zeros from data
  }
  uint64_t h = nbytes_;
  for (const auto lane : lanes) {
    h = (h ^ lane) * 0x9e3779b97f4a7c15u; // odd, so that no two values of a lane become one
    h ^= h >> 32;
  }
  return h == 0 ? 1 : h;
}

} // namespace epload
