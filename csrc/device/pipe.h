// The pipe between the host and a device. Bytes cross it in pinned pieces, a few of each thread's own: so small, and so
// soon used again, that they stay in the processor's cache, and a byte that is read from a file and sent to the device
// does not go to memory and back in between.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <torch/custom_class.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace epload {

constexpr int64_t kPieceAlignment = 4096;         // bytes; what O_DIRECT wants
constexpr int64_t kMostPinned = int64_t{1} << 32; // bytes of a pipe

class DevicePipe : public torch::CustomClassHolder {
 public:
  struct Piece {
    at::Tensor host;
    at::Tensor device; // as many bytes, for what does not cross straight to its tensor
    c10::Event done;   // what used the piece last
  };

  // What one thread uses: its stream, and pieces that it takes in turn.
  struct Lane {
    c10::Stream stream;
    std::vector<Piece> pieces;
    size_t turn = 0;

    // The next piece, once nothing uses it any more.
    Piece& next();
  };

  // For `threads` threads. Throws ValueError if `piece_bytes` is no multiple of kPieceAlignment, or if all pieces take
  // more than kMostPinned.
  DevicePipe(c10::Device device, int64_t threads, int64_t piece_bytes);

  // Waits until nothing uses the pieces.
  ~DevicePipe() override;

  DevicePipe(const DevicePipe&) = delete;
  DevicePipe& operator=(const DevicePipe&) = delete;
  DevicePipe(DevicePipe&&) = delete;
  DevicePipe& operator=(DevicePipe&&) = delete;

  c10::Device device() const {
    return device_;
  }
  int64_t threads() const {
    return static_cast<int64_t>(lanes_.size());
  }
  int64_t piece_bytes() const {
    return piece_bytes_;
  }

  // For its lifetime, the pipe is the caller's alone, and what is on the current stream comes before what is queued on
  // the pipe's.
  class Use {
   public:
    explicit Use(DevicePipe& pipe);
    ~Use(); // finishes if that was not done

    // What comes on the current stream from now on comes after what was queued on the pipe's.
    void finish();

    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    Use(Use&&) = delete;
    Use& operator=(Use&&) = delete;

    Lane& lane(size_t thread) {
      return pipe_.lanes_[thread];
    }

   private:
    DevicePipe& pipe_;
    std::lock_guard<std::mutex> hold_;
    c10::Stream caller_;
    bool finished_ = false;
  };

 private:
  c10::Device device_;
  int64_t piece_bytes_;
  std::vector<Lane> lanes_;
  std::mutex mutex_;
};

// Once per process, before the first op that names it.
void register_device_pipe_class();

} // namespace epload
