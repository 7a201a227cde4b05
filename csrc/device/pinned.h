// Memory of the host that a device copies from and to by itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace epload {

// uint8 memory that starts at a page. Where the device's driver can pin what is there already, huge pages that a few
// threads have touched, which takes a third of the time of torch's own pinned memory; else that.
at::Tensor pinned_memory(int64_t nbytes, c10::Device device);

} // namespace epload
