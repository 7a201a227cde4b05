#include "board.h"

#include "../tensor_memory.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cmath>
#include <ctime>

namespace epload {
namespace {

using Word = std::atomic<int32_t>;
static_assert(sizeof(Word) == sizeof(int32_t) && Word::is_always_lock_free);

Word* words_of(const at::Tensor& board) {
  check_array("board", "the words", board, at::kInt, 1);
  TORCH_CHECK_VALUE(
      board.numel() >= kBoardFixedWords, "board: expected at least ", kBoardFixedWords, " words, got ", board.numel());
  auto* const words = board.data_ptr<int32_t>();
  TORCH_CHECK_VALUE(
      reinterpret_cast<uintptr_t>(words) % alignof(Word) == 0, "board: expected words at multiples of their size");
  return reinterpret_cast<Word*>(words);
}

Word& counter(const at::Tensor& board, Word* words, int64_t slot) {
  TORCH_CHECK_VALUE(
      slot >= 0 && slot < board.numel() - kBoardFixedWords,
      "board: expected a slot below ",
      board.numel() - kBoardFixedWords,
      ", got ",
      slot);
  return words[kBoardFixedWords + slot];
}

// A post wakes only those who wait for its counter (or one that shares its bit): of the many threads of a node, most
// wait for something else, and on busy cores each that wakes for nothing delays one that has work.
constexpr uint32_t kEveryone = FUTEX_BITSET_MATCH_ANY;
constexpr uint32_t kFailure = 1U << 31;

uint32_t bit_of(int64_t slot) {
  return 1U << (slot % 31);
}

void wake(Word* words, uint32_t bits) {
  words[0].fetch_add(1, std::memory_order_acq_rel);
  syscall(SYS_futex, &words[0], FUTEX_WAKE_BITSET, INT_MAX, nullptr, nullptr, bits);
}

// Not std::atomic::wait, which sleeps on a futex that is private to the process. Sleeps until `until`, or `bits` are
// woken.
void sleep_while(Word& word, int32_t value, std::chrono::steady_clock::time_point until, uint32_t bits) {
  const auto since = until.time_since_epoch(); // of CLOCK_MONOTONIC, which is steady_clock
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since);
  const timespec deadline{seconds.count(), std::chrono::nanoseconds(since - seconds).count()};
  syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, value, &deadline, nullptr, bits);
}

} // namespace

void board_post(const at::Tensor& board, int64_t slot, int64_t value) {
  TORCH_CHECK_VALUE(
      value >= INT32_MIN && value <= INT32_MAX, "board: expected a value that fits in an int32, got ", value);
  TORCH_CHECK_VALUE(slot != -1 || value != 0, "board: expected a failure to be posted as another value than 0");
  auto* const words = words_of(board);
  (slot == -1 ? words[1] : counter(board, words, slot)).store(static_cast<int32_t>(value), std::memory_order_release);
  wake(words, slot == -1 ? kEveryone : bit_of(slot));
}

void board_nudge(const at::Tensor& board) {
  wake(words_of(board), kFailure);
}

bool board_wait_failure(const at::Tensor& board, const std::atomic<bool>& quit) {
  auto* const words = words_of(board);
  for (;;) {
    const auto seen = words[0].load(std::memory_order_acquire); // before what follows, so that no nudge is missed
    if (quit.load(std::memory_order_acquire)) {
      return false;
    }
    if (words[1].load(std::memory_order_acquire) != 0) {
      return true;
    }
    sleep_while(words[0], seen, std::chrono::steady_clock::now() + std::chrono::seconds(60), kFailure);
  }
}

int64_t board_wait(const at::Tensor& board, c10::IntArrayRef slots, int64_t value, double seconds) {
  using Clock = std::chrono::steady_clock;
  TORCH_CHECK_VALUE(seconds >= 0 && seconds < 1e9, "board: expected a limit of 0 to 1e9 seconds, got ", seconds);
  const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  auto* const words = words_of(board);
  for (;;) {
    const auto seen = words[0].load(std::memory_order_acquire); // before the counters, so that no post is missed
    int64_t behind = kBoardReached;
    for (const auto slot : slots) {
      if (counter(board, words, slot).load(std::memory_order_acquire) < value) {
        behind = slot;
        break;
      }
    }
    if (behind == kBoardReached) {
      return behind;
    }
    if (words[1].load(std::memory_order_acquire) != 0) {
      return kBoardFailed;
    }
    if (Clock::now() >= until) {
      return behind;
    }
    sleep_while(words[0], seen, until, bit_of(behind));
  }
}

} // namespace epload

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  m.impl("board_post", TORCH_FN(epload::board_post));
  m.impl("board_wait", TORCH_FN(epload::board_wait));
}
