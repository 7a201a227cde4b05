#include "pipe.h"

#include "pinned.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <chrono>
#include <map>
#include <thread>
#include <utility>

namespace epload {
namespace {

constexpr int64_t kPieces = 2;              // of a thread: one is filled while the other crosses
constexpr std::chrono::seconds kFreeing{5}; // what copies may take to end

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// The first streams of a device that pipes use: always the same, as a process has few of them.
std::vector<c10::Stream> streams_of(c10::Device device, int64_t count) {
  static std::mutex mutex;
  static std::map<c10::DeviceType, std::map<c10::DeviceIndex, std::vector<c10::Stream>>> all;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& known = all[device.type()][device.index()];
  const c10::impl::VirtualGuardImpl impl(device.type());
  while (static_cast<int64_t>(known.size()) < count) {
    known.push_back(impl.getNewStream(device));
  }
  return {known.begin(), known.begin() + count};
}

} // namespace

DevicePipe::Piece& DevicePipe::Lane::next() {
  auto& piece = pieces[turn++ % pieces.size()];
  piece.done.synchronize();
  return piece;
}

DevicePipe::DevicePipe(c10::Device device, int64_t threads, int64_t piece_bytes)
    : device_(device), piece_bytes_(piece_bytes) {
  TORCH_CHECK_VALUE(
      !device.is_cpu() && device.has_index(), "device_pipe: expected a device with its index, got ", device);
  TORCH_CHECK_VALUE(
      threads > 0 && piece_bytes > 0 && piece_bytes % kPieceAlignment == 0 &&
          piece_bytes <= kMostPinned / kPieces / threads,
      "device_pipe: expected threads with ",
      kPieces,
      " pieces each, whose size is a multiple of ",
      kPieceAlignment,
      " bytes, and at most ",
      kMostPinned,
      " bytes in all, got ",
      threads,
      " threads and pieces of ",
      piece_bytes);
  const auto streams = streams_of(device, threads);
  const int64_t nbytes = threads * kPieces * piece_bytes;
  const auto on_host = pinned_memory(nbytes, device);
  // At once, as torch's allocator reserves 20 MB for the first such piece on each stream.
  const auto on_device = at::empty({nbytes}, at::TensorOptions().dtype(at::kByte).device(device));
  c10::Event usable(device.type()); // once nothing uses what had the memory before
  usable.record(current_stream(device));
  int64_t at = 0;
  for (const auto& stream : streams) {
    usable.block(stream);
    auto& lane = lanes_.emplace_back(Lane{stream, {}});
    for (int64_t k = 0; k < kPieces; ++k, at += piece_bytes) {
      lane.pieces.push_back(
          {on_host.narrow(0, at, piece_bytes), on_device.narrow(0, at, piece_bytes), c10::Event(device.type())});
    }
  }
}

// Not in the driver, where a wait for what a caller's collective keeps from running would never end: what is still in
// use then stays, until the process ends.
DevicePipe::~DevicePipe() {
  const auto until = std::chrono::steady_clock::now() + kFreeing;
  for (const auto& lane : lanes_) {
    for (const auto& piece : lane.pieces) {
      try {
        while (!piece.done.query()) {
          if (std::chrono::steady_clock::now() > until) {
            TORCH_WARN("epload: pinned memory stays, as copies of ", device_, " do not end");
            new std::vector<Lane>(std::move(lanes_));
            return;
          }
          std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
      } catch (const std::exception&) {
        // The device is of no more use.
      }
    }
  }
}

DevicePipe::Use::Use(DevicePipe& pipe) : pipe_(pipe), hold_(pipe.mutex_), caller_(current_stream(pipe.device_)) {
  c10::Event event(pipe.device_.type());
  event.record(caller_);
  for (const auto& lane : pipe.lanes_) {
    event.block(lane.stream);
  }
}

void DevicePipe::Use::finish() {
  finished_ = true;
  for (const auto& lane : pipe_.lanes_) {
    c10::Event event(pipe_.device_.type());
    event.record(lane.stream);
    event.block(caller_);
  }
}

DevicePipe::Use::~Use() {
  if (!finished_) { // an error is on its way
    try {
      finish();
    } catch (const std::exception& e) {
      TORCH_WARN("epload: ", caller_, " does not wait for the copies of ", pipe_.device_, ": ", e.what());
    }
  }
}

void register_device_pipe_class() {
  static const auto registered = torch::class_<DevicePipe>("epload", "DevicePipe");
  (void)registered;
}

namespace {

c10::intrusive_ptr<DevicePipe> device_pipe(c10::Device device, int64_t threads, int64_t piece_bytes) {
  return c10::make_intrusive<DevicePipe>(device, threads, piece_bytes);
}

at::Tensor pinned(int64_t nbytes, c10::Device device) {
  constexpr int64_t kMost = int64_t{1} << 48; // what processes can address
  TORCH_CHECK_VALUE(nbytes > 0 && nbytes <= kMost, "pinned_memory: expected 1 to ", kMost, " bytes, got ", nbytes);
  TORCH_CHECK_VALUE(
      !device.is_cpu() && device.has_index(), "pinned_memory: expected a device with its index, got ", device);
  return pinned_memory(nbytes, device);
}

} // namespace
} // namespace epload

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  epload::register_device_pipe_class();
  m.impl("device_pipe", TORCH_FN(epload::device_pipe));
  m.impl("pinned_memory", TORCH_FN(epload::pinned));
}
