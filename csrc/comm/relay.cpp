#include "relay.h"

#include "../tensor_memory.h"
#include "board.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace epload {
namespace {

constexpr size_t kAhead = 4; // receives posted in each group before they are needed, so that no sender waits for one

struct Chunk {
  const RelayStep* step;
  int64_t begin, nbytes;

  at::Tensor of(const at::Tensor& bucket) const {
    return bucket.narrow(0, begin, nbytes);
  }
};

void check(
    const at::Tensor& bucket,
    const std::vector<RelayStep>& steps,
    const Group& inter,
    const Group& intra,
    int64_t chunk_bytes) {
  check_array("relay", "the bucket", bucket, at::kByte, 1);
  TORCH_CHECK_VALUE(chunk_bytes > 0, "relay: expected chunk_bytes of at least 1, got ", chunk_bytes);
  for (size_t i = 0; i < steps.size(); ++i) {
    const auto& s = steps[i];
    TORCH_CHECK_VALUE(
        0 <= s.begin && s.begin <= s.end && s.end <= bucket.numel(),
        "relay: step ",
        i,
        " covers bytes [",
        s.begin,
        ", ",
        s.end,
        ") of a bucket of ",
        bucket.numel());
    TORCH_CHECK_VALUE(
        s.from_inter < 0 || s.from_intra < 0,
        "relay: step ",
        i,
        " comes from two ranks, ",
        s.from_inter,
        " and ",
        s.from_intra);
    for (const auto& [peer, group] :
         {std::pair{s.from_inter, &inter}, {s.from_intra, &intra}, {s.to_inter, &inter}, {s.to_intra, &intra}}) {
      TORCH_CHECK_VALUE(
          peer < 0 || group->contains(peer),
          "relay: step ",
          i,
          " names rank ",
          peer,
          ", but the ranks of its group are ",
          group->ranks());
      TORCH_CHECK_VALUE(
          peer < 0 || peer != group->self(), "relay: step ", i, " names rank ", peer, ", which is this rank itself");
    }
  }
}

std::vector<Chunk> cut(const std::vector<RelayStep>& steps, int64_t chunk_bytes) {
  std::vector<Chunk> chunks;
  for (const auto& step : steps) {
    for (int64_t begin = step.begin; begin < step.end; begin += chunk_bytes) {
      chunks.push_back({&step, begin, std::min(chunk_bytes, step.end - begin)});
    }
  }
  return chunks;
}

// Waits for the messages of one relay. A thread of its own waits for a failure on the board and then aborts that wait,
// as no call of c10d waits for a message and for anything else.
class Waiter {
 public:
  Waiter(const std::optional<at::Tensor>& board, double seconds)
      : board_(board), limit_(static_cast<int64_t>(std::ceil(seconds * 1e3))) {
    if (board_.has_value()) {
      board_wait(*board_, {}, 0, 0); // throws if it is not a board; in the thread that would end the process
      sentry_ = std::thread([this] {
        if (board_wait_failure(*board_, quit_)) {
          const std::lock_guard<std::mutex> hold(lock_);
          failed_ = true;
          if (current_ != nullptr) {
            current_->abort();
          }
        }
      });
    }
  }

  ~Waiter() {
    if (sentry_.joinable()) {
      quit_ = true;
      board_nudge(*board_);
      sentry_.join();
    }
  }

  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  void wait(const Work& work, const char* direction, int64_t peer) {
    bool complete = false;
    try {
      enter(work.get());
      complete = limit_.count() > 0 ? work->wait(limit_) : work->wait();
    } catch (const std::exception& e) {
      leave();
      TORCH_CHECK(false, "relay: the message ", direction, " rank ", peer, " failed: ", e.what());
    }
    leave();
    TORCH_CHECK(complete, kGivenUp);
  }

 private:
  static constexpr const char* kGivenUp = "relay: given up, as another rank failed";

  void enter(c10d::Work* work) {
    const std::lock_guard<std::mutex> hold(lock_);
    TORCH_CHECK(!failed_, kGivenUp);
    current_ = work;
  }

  void leave() {
    const std::lock_guard<std::mutex> hold(lock_);
    current_ = nullptr;
  }

  const std::optional<at::Tensor>& board_;
  const std::chrono::milliseconds limit_;
  std::atomic<bool> quit_{false};
  std::mutex lock_;
  bool failed_ = false;
  c10d::Work* current_ = nullptr;
  std::thread sentry_;
};

struct Sending {
  Work work;
  int64_t peer;
};

// The receives of chunks over one of the two groups, in order. Each group has its own, so that the many messages inside
// a node do not delay the receives of those between nodes.
class Inbox {
 public:
  Inbox(const Group& group, int64_t RelayStep::* from) : group_(group), from_(from) {
  }

  // The rank that a chunk comes from; -1 if not over this group.
  int64_t sender(const Chunk& chunk) const {
    return chunk.step->*from_;
  }

  // Posts receives until enough are pending; returns how many.
  int64_t post_ahead(const at::Tensor& bucket, const std::vector<Chunk>& chunks) {
    int64_t posted = 0;
    for (; at_ < chunks.size() && waiting_.size() < kAhead; ++at_) {
      if (sender(chunks[at_]) >= 0) {
        waiting_.push_back(group_.receive(chunks[at_].of(bucket), sender(chunks[at_])));
        ++posted;
      }
    }
    return posted;
  }

  Work next() {
    auto work = std::move(waiting_.front());
    waiting_.pop_front();
    return work;
  }

 private:
  const Group& group_;
  int64_t RelayStep::* from_;
  std::deque<Work> waiting_;
  size_t at_ = 0; // chunks before this have their receive posted
};

} // namespace

int64_t relay(
    const at::Tensor& bucket,
    const std::vector<RelayStep>& steps,
    const Group& inter,
    const Group& intra,
    int64_t chunk_bytes,
    const std::optional<at::Tensor>& board,
    double seconds) {
  check(bucket, steps, inter, intra, chunk_bytes);
  TORCH_CHECK_VALUE(seconds >= 0 && seconds < 1e9, "relay: expected a limit of 0 to 1e9 seconds, got ", seconds);
  chunk_bytes = std::min(chunk_bytes, std::max<int64_t>(bucket.numel(), 1)); // so that no sum below overflows
  const auto chunks = cut(steps, chunk_bytes);
  int64_t messages = 0;
  Waiter waiter(board, seconds);
  mark_written(bucket);
  std::vector<Sending> sends;
  Inbox from_inter(inter, &RelayStep::from_inter), from_intra(intra, &RelayStep::from_intra);
  for (const auto& chunk : chunks) {
    for (auto* const inbox : {&from_inter, &from_intra}) {
      messages += inbox->post_ahead(bucket, chunks);
    }
    auto& inbox = chunk.step->from_inter >= 0 ? from_inter : from_intra;
    if (inbox.sender(chunk) >= 0) {
      waiter.wait(inbox.next(), "from", inbox.sender(chunk));
      messages += inbox.post_ahead(bucket, chunks); // before sending on, so that the link behind us is never idle
    }
    if (chunk.step->to_inter >= 0) {
      sends.push_back({inter.send(chunk.of(bucket), chunk.step->to_inter), chunk.step->to_inter});
      ++messages;
    }
    if (chunk.step->to_intra >= 0) {
      sends.push_back({intra.send(chunk.of(bucket), chunk.step->to_intra), chunk.step->to_intra});
      ++messages;
    }
  }
  for (const auto& [work, peer] : sends) {
    waiter.wait(work, "to", peer);
  }
  return messages;
}

namespace {

int64_t relay_op(
    const at::Tensor& bucket,
    const at::Tensor& steps,
    const std::string& inter_group,
    const std::string& intra_group,
    int64_t chunk_bytes,
    const std::optional<at::Tensor>& board,
    double seconds) {
  const auto* row = numbers_of("relay", "the steps", steps, 2);
  TORCH_CHECK_VALUE(steps.size(1) == 6, "relay: expected steps of 6 numbers, got ", steps.size(1));
  const at::NoGradGuard no_grad;
  std::vector<RelayStep> rows;
  for (int64_t i = 0; i < steps.size(0); ++i, row += 6) {
    rows.push_back({row[0], row[1], row[2], row[3], row[4], row[5]});
  }
  const auto device = bucket.device().type();
  return relay(bucket, rows, {inter_group, device}, {intra_group, device}, chunk_bytes, board, seconds);
}

} // namespace
} // namespace epload

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  m.impl("relay", TORCH_FN(epload::relay_op));
}
