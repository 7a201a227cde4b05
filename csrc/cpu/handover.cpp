#include "handover.h"

#include <c10/util/Exception.h>

#include <cstdio>
#include <exception>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace {

struct Waiting {
  std::mutex lock;
  int64_t last = 0;
  std::unordered_map<int64_t, std::vector<at::Tensor>> tensors;
};

Waiting& waiting() {
  static auto* const made = new Waiting(); // never destroyed: at exit there is no interpreter to return tensors to
  return *made;
}

} // namespace

int64_t epload_hand_over(void* const* impls, uint64_t count, char* message, uint64_t room) noexcept {
  try {
    std::vector<at::Tensor> tensors;
    tensors.reserve(count);
    constexpr uint64_t kAhead = 16;
    for (uint64_t i = 0; i < count; ++i) {
      if (i + kAhead < count) {
        const auto* const next = static_cast<const char*>(impls[i + kAhead]);
        for (size_t at = 0; at < sizeof(at::TensorImpl); at += 64) {
          __builtin_prefetch(next + at, 1);
        }
      }
      auto* const impl = static_cast<at::TensorImpl*>(impls[i]);
      tensors.emplace_back(c10::intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>::reclaim_copy(impl));
    }
    auto& all = waiting();
    const std::lock_guard<std::mutex> hold(all.lock);
    const auto ticket = ++all.last;
    all.tensors.emplace(ticket, std::move(tensors));
    return ticket;
  } catch (const std::exception& error) {
    std::snprintf(message, room, "%s", error.what());
  } catch (...) {
    std::snprintf(message, room, "unknown error");
  }
  return 0;
}

namespace epload {

std::vector<at::Tensor> take_over(int64_t ticket) {
  auto& all = waiting();
  const std::lock_guard<std::mutex> hold(all.lock);
  auto found = all.tensors.extract(ticket);
  TORCH_CHECK_VALUE(
      !found.empty(),
      "gather: expected the ticket of tensors that were just handed over (epload.ops.gather), got ",
      ticket);
  return std::move(found.mapped());
}

} // namespace epload
