// The explicit stream of one call: entry wait, guard, exit wait. On CPU there are no streams and this does nothing.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <optional>

namespace epload {

// For its lifetime, `stream` (or the caller's current stream when none is given) is the current stream of `device`.
// Work queued by the caller before is waited for on the device; work the caller queues afterwards waits for ours. The
// host never waits. Not thread safe: one per call, on the calling thread.
class ExplicitStream {
 public:
  // Throws ValueError if `stream` is given and is not one of `device`.
  static void check(c10::Device device, const std::optional<c10::Stream>& stream) {
    TORCH_CHECK_VALUE(
        !stream.has_value() || !device.is_cpu(),
        "epload: expected stream=None for tensors on cpu, got a stream of ",
        stream->device());
    TORCH_CHECK_VALUE(
        !stream.has_value() || stream->device() == device,
        "epload: expected a stream of ",
        device,
        ", where the tensors are, got a stream of ",
        stream->device());
  }

  // `stream` has passed check().
  ExplicitStream(c10::Device device, std::optional<c10::Stream> stream) : device_(device) {
    if (device.is_cpu()) {
      return;
    }
    const c10::impl::VirtualGuardImpl impl(device.type());
    caller_ = impl.getStream(device);
    ours_ = stream.value_or(*caller_);
    if (*ours_ != *caller_) {
      join(*caller_, *ours_);
    }
    guard_.emplace(*ours_);
  }

  ~ExplicitStream() {
    guard_.reset();
    if (ours_ && *ours_ != *caller_) {
      try {
        join(*ours_, *caller_);
      } catch (const std::exception& e) {
        TORCH_WARN("epload: the exit wait from ", *ours_, " to ", *caller_, " failed: ", e.what());
      }
    }
  }

  ExplicitStream(const ExplicitStream&) = delete;
  ExplicitStream& operator=(const ExplicitStream&) = delete;

 private:
  void join(const c10::Stream& first, const c10::Stream& then) const {
    c10::Event event(device_.type());
    event.record(first);
    event.block(then);
  }

  c10::Device device_;
  std::optional<c10::Stream> caller_;
  std::optional<c10::Stream> ours_;
  std::optional<c10::StreamGuard> guard_;
};

} // namespace epload
