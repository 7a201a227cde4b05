#include "pipe.h"

#include "../tensor_memory.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <utility>

namespace epload {
namespace {

constexpr int64_t kPieces = 2; // of a thread: one is filled while the other crosses

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

} // namespace

const at::Tensor& DevicePipe::Piece::on_device(c10::Device where) {
  if (!device.defined()) {
    device = at::empty({host.numel()}, at::TensorOptions().dtype(at::kByte).device(where));
  }
  return device;
}

DevicePipe::Piece& DevicePipe::Lane::next() {
  auto& piece = pieces[turn++ % pieces.size()];
  piece.done.synchronize();
  return piece;
}

DevicePipe::DevicePipe(const at::Tensor& pinned, c10::Device device, int64_t threads) : device_(device) {
  check_memory("device_pipe", pinned, 0);
  TORCH_CHECK_VALUE(!device.is_cpu() && device.has_index(), "device_pipe: expected a device with its index, got ", device);
  TORCH_CHECK_VALUE(
      pinned.is_cpu() && pinned.scalar_type() == at::kByte && pinned.dim() == 1 && pinned.is_contiguous() &&
          reinterpret_cast<uintptr_t>(pinned.data_ptr()) % kPieceAlignment == 0,
      "device_pipe: expected contiguous uint8 memory on cpu that starts at a multiple of ",
      kPieceAlignment,
      ", got ",
      pinned.scalar_type(),
      " of shape ",
      pinned.sizes(),
      " on ",
      pinned.device());
  TORCH_CHECK_VALUE(
      threads > 0 && threads <= pinned.numel() / (kPieces * kPieceAlignment),
      "device_pipe: expected from 1 thread to as many as have pieces of ",
      kPieceAlignment,
      " bytes in ",
      pinned.numel(),
      ", got ",
      threads);
  piece_bytes_ = pinned.numel() / (threads * kPieces) / kPieceAlignment * kPieceAlignment;
  const c10::impl::VirtualGuardImpl impl(device.type());
  int64_t at = 0;
  for (int64_t i = 0; i < threads; ++i) {
    auto& lane = lanes_.emplace_back(Lane{impl.getNewStream(device), {}});
    for (int64_t k = 0; k < kPieces; ++k, at += piece_bytes_) {
      lane.pieces.push_back({pinned.narrow(0, at, piece_bytes_), c10::Event(device.type()), {}});
    }
  }
}

void DevicePipe::drain() {
  const std::lock_guard<std::mutex> hold(mutex_);
  for (const auto& lane : lanes_) {
    for (const auto& piece : lane.pieces) {
      piece.done.synchronize();
    }
  }
}

DevicePipe::Use::Use(DevicePipe& pipe)
    : pipe_(pipe), hold_(pipe.mutex_), caller_(current_stream(pipe.device_)) {
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

c10::intrusive_ptr<DevicePipe> device_pipe(const at::Tensor& pinned, c10::Device device, int64_t threads) {
  return c10::make_intrusive<DevicePipe>(pinned, device, threads);
}

void drain_pipe(const c10::intrusive_ptr<DevicePipe>& pipe) {
  pipe->drain();
}

} // namespace
} // namespace epload

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  epload::register_device_pipe_class();
  m.impl("device_pipe", TORCH_FN(epload::device_pipe));
  m.impl("drain_pipe", TORCH_FN(epload::drain_pipe));
}
