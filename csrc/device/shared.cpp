// Memory of a device that other processes of the machine copy from and to.
#include "../driver.h"
#include "../tensor_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <exception>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

namespace epload {
namespace {

const Driver& sharing_of(const char* op, c10::Device device) {
  const auto& driver = driver_of(device.type());
  TORCH_CHECK(driver.share != nullptr, op, ": memory of ", device, " cannot be shared between processes");
  return driver;
}

// Where memory of other processes is that is open, once for each time: a driver gives two who open the same memory the
// same address. Neither is ever destroyed, as tensors may outlive static destructors.
std::mutex& opened_mutex = *new std::mutex;
std::multiset<const void*>& opened = *new std::multiset<const void*>;

// See ops.py.
std::tuple<at::Tensor, at::Tensor, std::vector<int64_t>> share_memory(at::TensorList tensors) {
  TORCH_CHECK_VALUE(!tensors.empty(), "share_memory: expected at least one tensor");
  const auto device = tensors[0].device();
  check_device("share_memory", tensors, device);
  const auto& driver = sharing_of("share_memory", device);
  const c10::DeviceGuard on_device(device);
  auto places = at::empty({static_cast<int64_t>(tensors.size()), 2}, at::TensorOptions(at::kCPU).dtype(at::kLong));
  auto* place = places.mutable_data_ptr<int64_t>();
  std::vector<SharedAllocation> allocations;
  std::map<uint64_t, int64_t> known; // by the end of each allocation its number
  for (size_t i = 0; i < tensors.size(); ++i, place += 2) {
    place[0] = -1;
    place[1] = 0;
    if (tensors[i].numel() == 0) {
      continue;
    }
    check_memory("share_memory", tensors[i], i);
    const auto at = reinterpret_cast<uint64_t>(tensors[i].const_data_ptr());
    TORCH_CHECK(at % tensors[i].element_size() == 0, "the memory of tensor ", i, " is not aligned to its elements");
    auto found = known.upper_bound(at);
    if (found == known.end() || allocations[found->second].base > at) {
      auto& allocation = allocations.emplace_back();
      const auto obstacle = driver.share(tensors[i].const_data_ptr(), allocation);
      TORCH_CHECK(obstacle.empty(), obstacle);
      found = known.emplace(allocation.base + allocation.nbytes, static_cast<int64_t>(allocations.size()) - 1).first;
    }
    place[0] = found->second;
    place[1] = static_cast<int64_t>(at - allocations[found->second].base);
  }
  auto handles = at::empty({static_cast<int64_t>(allocations.size()), kHandleBytes}, at::kByte);
  auto* handle = handles.mutable_data_ptr<uint8_t>();
  std::vector<int64_t> sizes;
  for (const auto& allocation : allocations) {
    handle = std::copy(allocation.handle.begin(), allocation.handle.end(), handle);
    sizes.push_back(allocation.nbytes);
  }
  return {places, handles, sizes};
}

// See ops.py.
at::Tensor open_memory(const at::Tensor& handle, int64_t nbytes, c10::Device device) {
  TORCH_CHECK_VALUE(nbytes > 0, "open_memory: expected the bytes of an allocation, got ", nbytes);
  check_array("open_memory", "the handle", handle, at::kByte, 1);
  TORCH_CHECK_VALUE(handle.numel() == kHandleBytes, "open_memory: expected a handle of ", kHandleBytes, " bytes");
  const auto& driver = sharing_of("open_memory", device);
  std::array<char, kHandleBytes> bytes{};
  std::copy_n(handle.const_data_ptr<uint8_t>(), kHandleBytes, bytes.begin());
  const c10::DeviceGuard on_device(device);
  void* memory = nullptr;
  const auto obstacle = driver.open(bytes, memory);
  TORCH_CHECK(obstacle.empty(), "memory of another process cannot be opened on ", device, ": ", obstacle);
  {
    const std::lock_guard<std::mutex> lock(opened_mutex);
    opened.insert(memory);
  }
  const auto close = [device, close = driver.close, owner = getpid()](void* data) {
    if (getpid() != owner) {
      return; // a child of a fork has never had it
    }
    {
      const std::lock_guard<std::mutex> lock(opened_mutex);
      opened.erase(opened.find(data));
    }
    try {
      const c10::DeviceGuard closed_there(device);
      close(data);
    } catch (const std::exception&) {
      return; // the device is of no more use
    }
  };
  return at::for_blob(memory, {nbytes})
      .deleter(close)
      .options(at::TensorOptions(device).dtype(at::kByte))
      .target_device(device)
      .make_tensor();
}

// See ops.py.
void close_memory(const at::Tensor& memory) {
  check_memory("close_memory", memory, 0);
  auto* const storage = memory.storage().unsafeGetStorageImpl();
  {
    const std::lock_guard<std::mutex> lock(opened_mutex);
    TORCH_CHECK_VALUE(opened.count(storage->data()) > 0, "close_memory: expected memory that open_memory has opened");
  }
  storage->set_data_ptr_noswap(at::DataPtr(nullptr, memory.device()));
  storage->set_nbytes(0);
}

} // namespace

} // namespace epload

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  m.impl("share_memory", TORCH_FN(epload::share_memory));
  m.impl("open_memory", TORCH_FN(epload::open_memory));
  m.impl("close_memory", TORCH_FN(epload::close_memory));
}
