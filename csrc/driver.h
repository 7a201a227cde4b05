// What a type of device does in its own way. Each device's file sets its part when the library is loaded.
#pragma once

#include "copy_table.h"

#include <c10/core/DeviceType.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace epload {

enum class Direction { kPack, kUnpack }; // tensors -> bucket, bucket -> tensors

constexpr int64_t kHandleBytes = 64;

// What a driver gives out of one of its allocations, and all that another process needs to map it.
struct SharedAllocation {
  std::array<char, kHandleBytes> handle{};
  uint64_t base = 0;
  int64_t nbytes = 0;
};

// Functions are called with the device current; all may be null. Those that share memory return why they cannot, empty
// if they can, and leave no error for the next caller to find.
struct Driver {
  // See region_copy.h.
  void (*region_copy)(
      const at::Tensor& bucket,
      at::TensorList tensors,
      const std::vector<RegionCopy>& copies,
      Direction direction) = nullptr;

  // Pins memory that is there already; false if it cannot, with no trace of it.
  bool (*pin)(void* memory, size_t nbytes) = nullptr;
  void (*unpin)(void* memory) = nullptr;

  std::string (*share)(const void* memory, SharedAllocation& allocation) = nullptr; // the one that the memory is in
  std::string (*open)(const std::array<char, kHandleBytes>& handle, void*& memory) = nullptr;
  void (*close)(void* memory) = nullptr;

  // Whether a tensor's elements lie where its strides say; null if they always do.
  bool (*plain)(const at::Tensor& tensor) = nullptr;
};

Driver& driver_of(c10::DeviceType device);

struct RegisterDriver {
  RegisterDriver(c10::DeviceType device, const Driver& driver) {
    driver_of(device) = driver;
  }
};

} // namespace epload
