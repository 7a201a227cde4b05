// How tensors reach the ops from the Python module _C, 20,000 at a time: as arguments of an op they would cost more
// than all else that is done with them. _C, which knows Python and no torch, passes the TensorImpls of tensors that
// Python holds to a C function of this library, and Python passes the ticket that it returns to an op. So no op takes
// an address.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

extern "C" {
// Keeps the tensors for the op that takes the ticket, and returns the ticket, a positive number. Returns 0, with what
// is wrong in `message` of `room` bytes, when that is not possible. The caller holds the interpreter's lock, without
// which no other thread drops a tensor meanwhile.
__attribute__((visibility("default"))) int64_t
epload_hand_over(void* const* impls, uint64_t count, char* message, uint64_t room) noexcept;
}

namespace epload {

// What was handed over for a ticket, which is then used up. Throws ValueError for a ticket that is not, or no longer.
std::vector<at::Tensor> take_over(int64_t ticket);

} // namespace epload
