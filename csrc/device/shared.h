// Memory of a device that other processes of the machine copy from and to.
#pragma once

#include <c10/core/DeviceType.h>

#include <array>
#include <cstdint>
#include <string>

namespace epload {

constexpr int64_t kHandleBytes = 64;

// What a driver gives out of one of its allocations, and all that another process needs to map it.
struct SharedAllocation {
  std::array<char, kHandleBytes> handle{};
  uint64_t base = 0;
  int64_t nbytes = 0;
};

// A driver that shares memory. Its functions are called with the device current, return why they cannot, empty if they
// can, and leave no error for the next caller to find.
struct RegisterSharing {
  RegisterSharing(
      c10::DeviceType device,
      std::string (*share)(const void* memory, SharedAllocation& found), // the allocation that the memory is in
      std::string (*open)(const std::array<char, kHandleBytes>& handle, void*& memory), // the allocation's begin
      void (*close)(void* memory));
};

} // namespace epload
