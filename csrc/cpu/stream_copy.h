// Copies that bypass the caches: for memory that is written once and not read again soon, such as a model's shards.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace epload {

#if defined(__SSE2__)
constexpr bool kStreams = true;
#else
constexpr bool kStreams = false; // stream_copy is memcpy
#endif

// memcpy that neither fetches the lines that it overwrites nor evicts others. Other threads see what it wrote after a
// StreamFence of this thread is destroyed.
inline void stream_copy(char* to, const char* from, size_t nbytes) {
#if defined(__SSE2__)
  constexpr size_t kLine = 64;
  const size_t head = std::min(nbytes, (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine);
  std::memcpy(to, from, head);
  to += head;
  from += head;
  nbytes -= head;
  for (; nbytes >= kLine; nbytes -= kLine, to += kLine, from += kLine) {
    __m128i line[4];
    std::memcpy(line, from, kLine);
    for (size_t i = 0; i < 4; ++i) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, line[i]);
    }
  }
#endif
  std::memcpy(to, from, nbytes);
}

class StreamFence {
 public:
  StreamFence() = default;
  StreamFence(const StreamFence&) = delete;
  StreamFence& operator=(const StreamFence&) = delete;
  ~StreamFence() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
  }
};

} // namespace epload
