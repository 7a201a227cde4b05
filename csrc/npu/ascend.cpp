// libepload_npu: HCCL's broadcast and CANN's copies, literally on the current stream. Linked against torch_npu, which
// brings CANN.
#include "api.h"

#include <torch_npu/csrc/core/NPUStorageImpl.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/distributed/ProcessGroupHCCL.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <typeinfo>

#define EPLOAD_EXPORT __attribute__((visibility("default")))

namespace {

// Returns the status that `work` returns. If it throws, keeps the message, as no exception may leave a C function.
template <typename Work>
int guarded(EploadNpuError* error, const Work& work) noexcept {
  try {
    return work();
  } catch (const c10::Error& thrown) {
    std::snprintf(error->text, sizeof(error->text), "%s", thrown.what_without_backtrace());
  } catch (const std::exception& thrown) {
    std::snprintf(error->text, sizeof(error->text), "%s", thrown.what());
  } catch (...) {
    std::snprintf(error->text, sizeof(error->text), "an exception of unknown type");
  }
  return kEploadNpuThrew;
}

c10d_npu::ProcessGroupHCCL& of_torch_npu(c10d::Backend* backend) {
  auto* const group = dynamic_cast<c10d_npu::ProcessGroupHCCL*>(backend);
  TORCH_CHECK(group != nullptr, "it is not torch_npu's");
  return *group;
}

int broadcast(c10d::Backend* backend, void* data, uint64_t nbytes, uint32_t root) {
  const auto stream = c10_npu::getCurrentNPUStream();
  // Made on this thread if there is none yet. A broadcast of the group's own would leave HCCL's set-up of links to
  // torch_npu's task queue, which drops all later operators if it fails.
  const auto communicator =
      of_torch_npu(backend).getHcclCommByDevices({c10::Device(c10::DeviceType::PrivateUse1, stream.device_index())});
  // stream() first submits what is left in torch_npu's task queue for the device, so that the program's order is kept.
  return HcclBroadcast(data, nbytes, HCCL_DATA_TYPE_UINT8, root, communicator->getHcclComm(), stream.stream());
}

int ranks_of(c10d::Backend* backend, uint32_t* ranks, uint32_t size) {
  const auto& known = of_torch_npu(backend).groupRanks();
  TORCH_CHECK(known.size() == size, "it has ", size, " ranks and names ", known.size());
  std::copy(known.begin(), known.end(), ranks);
  return kEploadNpuDone;
}

int copy_all(const EploadNpuCopy* copies, uint64_t count) {
  const auto stream = c10_npu::getCurrentNPUStream().stream(); // submits the task queue first, as above
  for (const auto* copy = copies; copy != copies + count; ++copy) {
    const auto status =
        aclrtMemcpyAsync(copy->to, copy->nbytes, copy->from, copy->nbytes, ACL_MEMCPY_DEVICE_TO_DEVICE, stream);
    if (status != ACL_SUCCESS) {
      return status;
    }
  }
  return kEploadNpuDone;
}

} // namespace

EPLOAD_EXPORT uint32_t epload_npu_interface() noexcept {
  return kEploadNpuInterface;
}

EPLOAD_EXPORT int epload_npu_broadcast(
    c10d::Backend* backend, void* data, uint64_t nbytes, uint32_t root, EploadNpuError* error) noexcept {
  return guarded(error, [&] { return broadcast(backend, data, nbytes, root); });
}

EPLOAD_EXPORT int epload_npu_ranks(
    c10d::Backend* backend, uint32_t* ranks, uint32_t size, EploadNpuError* error) noexcept {
  return guarded(error, [&] { return ranks_of(backend, ranks, size); });
}

EPLOAD_EXPORT int epload_npu_abort(c10d::Backend* backend, EploadNpuError* error) noexcept {
  return guarded(error, [&] {
    of_torch_npu(backend).abort();
    return static_cast<int>(kEploadNpuDone);
  });
}

EPLOAD_EXPORT bool epload_npu_plain(const c10::StorageImpl* storage) noexcept {
  // One that torch_npu did not make has no format. Not a dynamic_cast, as torch_npu keeps its type's typeinfo to
  // itself.
  if (typeid(*storage) == typeid(c10::StorageImpl)) {
    return true;
  }
  switch (static_cast<const torch_npu::NPUStorageImpl*>(storage)->npu_desc_.npu_format_) {
    case ACL_FORMAT_ND:
    case ACL_FORMAT_NCHW:
    case ACL_FORMAT_NHWC:
    case ACL_FORMAT_NCDHW:
      return true;
    default:
      return false;
  }
}

EPLOAD_EXPORT int epload_npu_copy(const EploadNpuCopy* copies, uint64_t count, EploadNpuError* error) noexcept {
  return guarded(error, [&] { return copy_all(copies, count); });
}
