// A board: counters in memory that several processes or threads share. Each posts its progress, and waits for that of
// the others.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <atomic>
#include <cstdint>

namespace epload {

// Layout of a board, an int32 CPU tensor: word 0 changes with every post and is what waiters sleep on; word 1 is not 0
// once a failure was posted; the counters follow.
constexpr int64_t kBoardFixedWords = 2;
constexpr int64_t kBoardFailed = -2;
constexpr int64_t kBoardReached = -1;

// Sets counter `slot` and wakes those who wait for it, in any process that maps the memory. Slot -1 posts a failure,
// and wakes every waiter.
void board_post(const at::Tensor& board, int64_t slot, int64_t value);

// Waits until a failure is posted (true) or `quit` is set (false). Call board_nudge after setting `quit`.
bool board_wait_failure(const at::Tensor& board, const std::atomic<bool>& quit);

// Wakes those who wait for a failure, to check `quit`.
void board_nudge(const at::Tensor& board);

// Waits until every counter in `slots` is at least `value`. Returns kBoardReached, kBoardFailed as soon as a failure
// is posted, or after `seconds` the first slot that is behind. Writes made before a post are seen after the wait.
int64_t board_wait(const at::Tensor& board, c10::IntArrayRef slots, int64_t value, double seconds);

} // namespace epload
