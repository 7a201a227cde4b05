#include "relay.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <deque>
#include <utility>

namespace epload {
namespace {

constexpr size_t kAhead = 4; // receives posted before they are needed, so that a sender never waits for the next one

struct Chunk {
  const RelayStep* step;
  int64_t begin, nbytes;
};

void check(
    const at::Tensor& bucket,
    const std::vector<RelayStep>& steps,
    const Group& inter,
    const Group& intra,
    int64_t chunk_bytes) {
  TORCH_CHECK_VALUE(
      bucket.is_cpu() && bucket.scalar_type() == at::kByte && bucket.dim() == 1 && bucket.is_contiguous(),
      "relay: expected the bucket as a contiguous 1-D uint8 CPU tensor, got ",
      bucket.scalar_type(),
      " of shape ",
      bucket.sizes(),
      " on ",
      bucket.device());
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
    }
  }
}

} // namespace

int64_t relay(
    const at::Tensor& bucket,
    const std::vector<RelayStep>& steps,
    const Group& inter,
    const Group& intra,
    int64_t chunk_bytes) {
  check(bucket, steps, inter, intra, chunk_bytes);
  std::vector<Chunk> chunks;
  for (const auto& step : steps) {
    for (int64_t begin = step.begin; begin < step.end; begin += chunk_bytes) {
      chunks.push_back({&step, begin, std::min(chunk_bytes, step.end - begin)});
    }
  }
  const auto bytes_of = [&](const Chunk& chunk) { return bucket.narrow(0, chunk.begin, chunk.nbytes); };
  const auto arrives = [](const Chunk& chunk) { return chunk.step->from_inter >= 0 || chunk.step->from_intra >= 0; };

  int64_t messages = 0;
  std::vector<Work> sends;
  std::deque<Work> receives; // of the chunks from the current one on that arrive
  size_t posted = 0;         // chunks before this have their receive posted, if they arrive
  const auto post_until_ahead = [&] {
    for (; posted < chunks.size() && receives.size() < kAhead; ++posted) {
      const auto& chunk = chunks[posted];
      if (arrives(chunk)) {
        const auto& step = *chunk.step;
        receives.push_back(
            step.from_inter >= 0 ? inter.receive(bytes_of(chunk), step.from_inter)
                                 : intra.receive(bytes_of(chunk), step.from_intra));
        ++messages;
      }
    }
  };
  for (const auto& chunk : chunks) {
    post_until_ahead();
    if (arrives(chunk)) {
      receives.front()->wait();
      receives.pop_front();
      post_until_ahead(); // before sending on, so that the link behind us is never idle
    }
    if (chunk.step->to_inter >= 0) {
      sends.push_back(inter.send(bytes_of(chunk), chunk.step->to_inter));
      ++messages;
    }
    if (chunk.step->to_intra >= 0) {
      sends.push_back(intra.send(bytes_of(chunk), chunk.step->to_intra));
      ++messages;
    }
  }
  for (const auto& send : sends) {
    send->wait();
  }
  return messages;
}

} // namespace epload
