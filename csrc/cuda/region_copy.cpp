// The region copy on CUDA, on torch's side: builds the table, copies it to the device if it is large, and launches the
// kernel. It includes no CUDA header and is part of every build. Without libepload_cuda.so in libepload's
// folder, or on a device that cannot run its kernels, the regions are copied through ATen.
#include "../region_copy.h"
#include "../dtypes.h"
#include "../sibling_library.h"
#include "../strided.h"
#include "api.h"
#include "table.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Float8_e4m3fn.h>

#include <torch/library.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace epload {
namespace {

constexpr auto kDevice = c10::DeviceType::CUDA;

struct Library {
  decltype(&epload_cuda_ready) ready = nullptr; // null in a build without it
  decltype(&epload_cuda_region_copy) region_copy = nullptr;
  decltype(&epload_cuda_pin) pin = nullptr;
  decltype(&epload_cuda_unpin) unpin = nullptr;
  decltype(&epload_cuda_share) share = nullptr;
  decltype(&epload_cuda_open) open = nullptr;
  decltype(&epload_cuda_close) close = nullptr;
  decltype(&epload_cuda_error) error = nullptr;
};

Library open_library() {
  const SiblingLibrary sibling(
      "libepload_cuda.so",
      "epload_cuda_interface",
      kEploadCudaInterface,
      "; rebuild epload with EPLOAD_CUDA=1, or with EPLOAD_CUDA=0 to do without it");
  Library library;
  if (sibling.present()) {
    sibling.find(library.ready, "epload_cuda_ready");
    sibling.find(library.region_copy, "epload_cuda_region_copy");
    sibling.find(library.pin, "epload_cuda_pin");
    sibling.find(library.unpin, "epload_cuda_unpin");
    sibling.find(library.share, "epload_cuda_share");
    sibling.find(library.open, "epload_cuda_open");
    sibling.find(library.close, "epload_cuda_close");
    sibling.find(library.error, "epload_cuda_error");
  }
  return library;
}

const Library& library() {
  static const Library opened = open_library();
  return opened;
}

// Why the kernels do not run on the current device, `device`; empty if they do. Asked and warned of once per device.
const std::string& obstacle(c10::Device device) {
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, std::string> known;
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(device.index());
  if (found == known.end()) {
    std::string reason;
    if (library().ready == nullptr) {
      reason = "this build has none; build with nvcc, or EPLOAD_CUDA=1 to see why there are none";
    } else if (const int error = library().ready(); error != 0) {
      reason = library().error(error);
    }
    if (!reason.empty()) {
      TORCH_WARN(
          "epload: its CUDA kernels do not run on ",
          device,
          ": ",
          reason,
          ". Regions are copied with one call of torch's each, which is correct but slow");
    }
    found = known.emplace(device.index(), std::move(reason)).first;
  }
  return found->second;
}

// The same for Python; `device` need not be the current one, or be there.
std::string cuda_obstacle(c10::Device device) {
  TORCH_CHECK_VALUE(device.type() == kDevice, "cuda_obstacle: expected a device of CUDA, got ", device);
  if (!c10::impl::hasDeviceGuardImpl(kDevice) || device.index() >= c10::impl::VirtualGuardImpl(kDevice).deviceCount()) {
    return "torch finds no such device";
  }
  const c10::DeviceGuard on_device(device);
  return obstacle(on_device.current_device());
}

cuda::Number number_of(at::ScalarType dtype) {
  if (dtype == at::ScalarType::Float8_e4m3fn && !c10::Float8_e4m3fn(1e6F).isnan()) {
    return cuda::Number::kFloat8E4M3Clamped; // torch's own conversion clamps or not, by its version
  }
  const auto* const row = find_dtype(dtype);
  return row == nullptr ? cuda::Number::kNone : row->number;
}

// False if the kernel cannot do this region.
bool add(cuda::Table& table, char* base, const at::Tensor& tensor, const RegionCopy& copy, Direction direction) {
  const bool convert = tensor.scalar_type() != copy.dtype;
  const auto ours = convert ? number_of(tensor.scalar_type()) : cuda::Number::kNone;
  const auto theirs = convert ? number_of(copy.dtype) : cuda::Number::kNone;
  if (convert && (ours == cuda::Number::kNone || theirs == cuda::Number::kNone)) {
    return false;
  }
  const auto s = collapse(tensor, copy);
  char* const data = static_cast<char*>(tensor.data_ptr());
  const cuda::Side there{data + s.tensor, s.tensor_stride.data(), ours, static_cast<int64_t>(tensor.element_size())};
  const cuda::Side here{
      base + s.bucket, s.bucket_stride.data(), theirs, static_cast<int64_t>(c10::elementSize(copy.dtype))};
  const bool unpack = direction == Direction::kUnpack;
  return table.add(
      unpack ? here : there, unpack ? there : here, s.run, s.size.data(), static_cast<int64_t>(s.size.size()));
}

// Queues the copies of a table on the current stream. A small table is an argument of the launch; a large one is copied
// to the device first. All memory is torch's: what is pinned is not reused before the copy has run, and what is the
// device's not by another stream than this. So nothing here waits.
void launch(const cuda::Table& table, c10::Device device) {
  const auto bytes = at::TensorOptions().dtype(at::kByte);
  const bool small = table.nbytes() <= kEploadCudaInlineBytes;
  auto records = at::empty({table.nbytes()}, bytes.pinned_memory(!small));
  table.write(static_cast<char*>(records.data_ptr()));
  if (!small) {
    const auto host = std::exchange(records, at::empty({table.nbytes()}, bytes.device(device)));
    records.copy_(host, /*non_blocking=*/true);
  }
  const EploadCudaTable placed{
      records.data_ptr(), static_cast<uint64_t>(table.nbytes()), table.chunks(), table.converts()};
  const auto stream = c10::impl::VirtualGuardImpl(kDevice).getStream(device);
  const int error = library().region_copy(&placed, stream.native_handle());
  TORCH_CHECK(error == 0, "epload: the region copy on ", device, " failed: ", library().error(error));
}

void region_copy_cuda(
    const at::Tensor& bucket, at::TensorList tensors, const std::vector<RegionCopy>& copies, Direction direction) {
  const c10::DeviceGuard on_device(bucket.device());
  if (!obstacle(bucket.device()).empty()) {
    region_copy_aten(bucket, tensors, copies, direction);
    return;
  }
  cuda::Table table;
  char* const base = static_cast<char*>(bucket.data_ptr());
  for (const auto& copy : copies) {
    if (!add(table, base, tensors[copy.tensor], copy, direction)) {
      copy_one_aten(bucket, tensors[copy.tensor], copy, direction);
    }
  }
  if (!table.empty()) {
    launch(table, bucket.device());
  }
}

bool pin(void* memory, size_t nbytes) {
  return library().pin != nullptr && library().pin(memory, nbytes) == 0;
}

void unpin(void* memory) {
  library().unpin(memory);
}

std::string share(const void* memory, SharedAllocation& found) {
  if (library().share == nullptr) {
    return "this build of epload has no CUDA library, which shares memory; build with nvcc";
  }
  EploadCudaAllocation allocation{};
  if (const int error = library().share(memory, &allocation); error != 0) {
    return c10::str(
        library().error(error),
        ": CUDA shares what cudaMalloc gives out, but not expandable segments (PYTORCH_CUDA_ALLOC_CONF) or memory of "
        "cudaMallocAsync");
  }
  std::copy_n(allocation.handle, kHandleBytes, found.handle.begin());
  found.base = allocation.base;
  found.nbytes = static_cast<int64_t>(allocation.nbytes);
  return "";
}

std::string open(const std::array<char, kHandleBytes>& handle, void*& memory) {
  if (library().open == nullptr) {
    return "this build of epload has no CUDA library; build with nvcc";
  }
  const int error = library().open(handle.data(), &memory);
  return error == 0 ? "" : library().error(error);
}

void close(void* memory) {
  library().close(memory);
}

const RegisterDriver registered_cuda(kDevice, {region_copy_cuda, pin, unpin, share, open, close});

} // namespace
} // namespace epload

TORCH_LIBRARY_IMPL(epload, CompositeExplicitAutograd, m) {
  m.impl("cuda_obstacle", TORCH_FN(epload::cuda_obstacle));
}
