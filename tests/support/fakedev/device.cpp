// The fake accelerator as torch sees a device: allocators, guard, hooks, and the ops that have to be the device's own.
#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <map>

namespace fakedev {
namespace {

c10::Device on(int index) {
  return {kType, static_cast<c10::DeviceIndex>(index)};
}

int index_of(c10::Device d) {
  return d.has_index() ? d.index() : device();
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* const data = fakedev::allocate(nbytes);
    return {data, data, &fakedev::deallocate, on(device())};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &fakedev::deallocate;
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    current().push("copy", [=] { std::memcpy(to, from, nbytes); });
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    release_cached();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_stream(data.get_context(), stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    return {};
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {
  }
  void resetPeakStats(c10::DeviceIndex) override {
  }
};

DeviceMemory device_memory;
REGISTER_ALLOCATOR(kType, &device_memory);

// Host memory that copies need not wait for. Poisoned when freed.
struct PinnedMemory final : c10::Allocator {
  std::mutex mutex;
  std::map<const char*, size_t> blocks;

  c10::DataPtr allocate(size_t nbytes) override;
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
  bool holds(const void* data) {
    const std::lock_guard<std::mutex> lock(mutex);
    auto after = blocks.upper_bound(static_cast<const char*>(data));
    return after != blocks.begin() && static_cast<const char*>(data) < (--after)->first + after->second;
  }
};

PinnedMemory& pinned_memory() {
  static auto* const one = new PinnedMemory;
  return *one;
}

void free_pinned(void* data) {
  auto& pinned = pinned_memory();
  {
    const std::lock_guard<std::mutex> lock(pinned.mutex);
    std::memset(data, 0xDB, pinned.blocks.extract(static_cast<const char*>(data)).mapped());
  }
  std::free(data);
}

} // namespace

void pin(void* memory, size_t nbytes) {
  const std::lock_guard<std::mutex> lock(pinned_memory().mutex);
  pinned_memory().blocks[static_cast<const char*>(memory)] = nbytes;
}

void unpin(void* memory) {
  const std::lock_guard<std::mutex> lock(pinned_memory().mutex);
  std::memset(memory, 0xDB, pinned_memory().blocks.extract(static_cast<const char*>(memory)).mapped());
}

namespace {

c10::DataPtr PinnedMemory::allocate(size_t nbytes) {
  const size_t rounded = (nbytes + 4096) / 4096 * 4096;
  void* const data = std::aligned_alloc(4096, rounded);
  TORCH_CHECK(data != nullptr, "fakedev: out of host memory, asked for ", rounded, " bytes");
  const std::lock_guard<std::mutex> lock(mutex);
  blocks[static_cast<const char*>(data)] = rounded;
  return {data, data, &free_pinned, c10::Device(c10::kCPU)};
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device d) const override {
    const auto before = getDevice();
    setDevice(d);
    return before;
  }
  c10::Device getDevice() const override {
    return on(device());
  }
  void setDevice(c10::Device d) const override {
    set_device(index_of(d));
    make_context(device());
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    set_device(index_of(d));
  }
  c10::Stream getStream(c10::Device d) const override {
    return stream(index_of(d));
  }
  c10::Stream getDefaultStream(c10::Device d) const override {
    return make_stream(index_of(d), 0);
  }
  c10::Stream getNewStream(c10::Device d, int) const override {
    return new_stream(index_of(d));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override {
    return new_stream(index_of(d));
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    const auto before = stream(s.device_index());
    set_stream(s);
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override {
    return &queue(s);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event;
    }
    make_contexts(s);
    static_cast<Event*>(*event)->record(queue(s));
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event != nullptr) {
      make_contexts(s);
      static_cast<Event*>(event)->block(queue(s));
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<Event*>(event)->done();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  bool queryStream(const c10::Stream& s) const override {
    return queue(s).idle();
  }
  void synchronizeStream(const c10::Stream& s) const override {
    queue(s).synchronize();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      static_cast<Event*>(event)->synchronize();
    }
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    for (auto* const one : queues(index)) {
      one->synchronize();
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    record_stream(data.get_context(), s);
  }
  // As c10::cuda's guard, which sets the stream's device, and then the one that the thread had before.
  static void make_contexts(const c10::Stream& s) {
    make_context(s.device_index());
    make_context(device());
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return 1000 * static_cast<Event*>(second)->seconds_since(*static_cast<Event*>(first));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex d) const override {
    return has_context(d);
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  void setCurrentDevice(c10::DeviceIndex d) const override {
    set_device(d);
    make_context(d);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    const auto before = getCurrentDevice();
    setCurrentDevice(d);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override {
    return exchangeDevice(d);
  }
  bool isPinnedPtr(const void* data) const override {
    return pinned_memory().holds(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory();
  }
  at::Device getDeviceFromPtr(void*) const override {
    return on(device());
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>();
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    const c10::DeviceGuard guard(storage.device());
    auto fresh = device_memory.allocate(nbytes);
    const size_t kept = std::min(nbytes, storage.nbytes());
    if (kept > 0) {
      device_memory.copy_data(fresh.get(), storage.data(), kept);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
};

const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// A tensor's memory and form without a claim on its storage: as on a device, memory that goes too early is read all the
// same.
struct View {
  explicit View(const at::Tensor& t)
      : data(t.numel() > 0 ? t.data_ptr() : nullptr),
        sizes(t.sizes().vec()),
        strides(t.strides().vec()),
        dtype(t.scalar_type()),
        conj(t.is_conj()),
        neg(t.is_neg()) {
  }

  at::Tensor on_host() const {
    auto t = at::from_blob(data, sizes, strides, at::TensorOptions().dtype(dtype));
    t._set_conj(conj);
    t._set_neg(neg);
    return t;
  }

  void* data;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  bool conj, neg;
};

at::Tensor empty(
    at::IntArrayRef sizes,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> where,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(where);
  return at::detail::empty_generic(
      sizes, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef sizes,
    at::IntArrayRef strides,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> where,
    std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(where);
  return at::detail::empty_strided_generic(
      sizes, strides, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// On the current stream of the device, or of the source's where there are two. The host waits where a real device would
// make it: for a copy from or to host memory that is not pinned or not asked to be asynchronous.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) {
    return target;
  }
  const bool to_device = source.is_cpu(), to_host = target.is_cpu();
  const c10::DeviceGuard guard(to_device ? target.device() : source.device());
  auto& ours = current();
  auto& theirs = to_host ? ours : queue(stream(target.device().index()));
  if (&ours != &theirs) { // what the target's stream still does with its memory comes first
    Event before;
    before.record(theirs);
    before.block(ours);
  }
  const auto& host = to_device ? source : target;
  const bool wait = (to_device || to_host) && !(non_blocking && pinned_memory().holds(host.data_ptr()));
  const View from(source.expand(target.sizes())), to(target);
  // As the host allocator of a real device: pinned memory stays until the copy is done.
  const auto kept = to_device || to_host ? host : at::Tensor();
  const char* const what = to_device ? "copy to device" : to_host ? "copy to host" : "copy";
  ours.push(what, [from, to, kept] {
    const at::AutoDispatchBelowAutograd below;
    to.on_host().copy_(from.on_host());
  });
  if (&ours != &theirs) {
    Event after;
    after.record(ours);
    after.block(theirs);
  }
  if (wait) {
    ours.synchronize();
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Tensor& fill(at::Tensor& target, const at::Scalar& value) {
  const c10::DeviceGuard guard(target.device());
  current().push("fill", [to = View(target), value] {
    const at::AutoDispatchBelowAutograd below;
    to.on_host().fill_(value);
  });
  return target;
}

at::Tensor& zero(at::Tensor& target) {
  return fill(target, 0);
}

void record_on(at::Tensor& tensor, c10::Stream user) {
  record_stream(tensor.storage().data_ptr().get_context(), user);
}

at::Tensor as_strided(
    const at::Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<int64_t> offset) {
  return at::cpu::as_strided(t, sizes, strides, offset);
}

at::Tensor& set_storage(
    at::Tensor& t, at::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::cpu::set_(t, std::move(storage), offset, sizes, strides);
}

// Everything else on the host, between synchronous copies on the current stream.
void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", [](const at::Tensor& t) { return t.cpu().item(); });
  m.impl("fill_.Scalar", fill);
  m.impl("zero_", zero);
  m.impl("record_stream", record_on);
  m.impl("as_strided", as_strided);
  m.impl("view", [](const at::Tensor& t, at::IntArrayRef sizes) { return at::native::view(t, sizes); });
  m.impl("_reshape_alias", [](const at::Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides) {
    return at::native::_reshape_alias(t, sizes, strides);
  });
  m.impl(
      "resize_",
      [](const at::Tensor& t, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) -> const at::Tensor& {
        return at::native::resize_(t, sizes, format);
      });
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", [](at::Tensor& t, const at::Tensor& source) -> at::Tensor& {
    return at::native::set_tensor_(t, source);
  });
  m.impl("set_.source_Storage", [](at::Tensor& t, at::Storage source) -> at::Tensor& {
    return at::native::set_(t, std::move(source));
  });
}

// The copy resolves lazy conjugates and negations itself; torch would resolve them by a copy, for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

} // namespace fakedev
