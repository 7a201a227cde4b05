// Memory of the host that a device copies from and to by itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>

namespace epload {

// uint8 memory that starts at a page. Where the device's driver can pin what is there already, huge pages that a few
// threads have touched, which takes a third of the time of torch's own pinned memory; else that.
at::Tensor pinned_memory(int64_t nbytes, c10::Device device);

// A driver that can. `pin` is called with the device current and returns false if it cannot, with no trace of it.
struct RegisterPinning {
  RegisterPinning(c10::DeviceType device, bool (*pin)(void* memory, size_t nbytes), void (*unpin)(void* memory));
};

} // namespace epload
