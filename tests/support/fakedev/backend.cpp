// A c10d backend for the fake accelerator: gloo, run from a stream, in the manner of NCCL or of HCCL. And the Python
// module.
#include "../../../csrc/cuda/chunk.h"
#include "runtime.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <map>
#include <string_view>
#include <thread>
#include <utility>

namespace fakedev {
namespace {

using Tensors = std::vector<at::Tensor>;
using Work = c10::intrusive_ptr<c10d::Work>;

// Whether aborting a communicator never returns, as NCCL's may not.
std::atomic<bool> aborts_wedge = false;

// A communicator, which may be aborted.
class Communicator {
 public:
  void abort() {
    while (aborts_wedge) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    aborted_ = true;
    changed_.notify_all();
  }

  // Runs a broadcast as a kernel does: it waits for its peers until it is aborted, does not notice that one has ended,
  // and is no error on its stream when it is aborted.
  template <typename Start>
  void run(const Start& start) {
    std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
    lock.lock();
    if (aborted_) {
      return;
    }
    lock.unlock();
    try {
      const auto work = start();
      lock.lock();
      while (!work->isCompleted() && !aborted_) {
        changed_.wait_for(lock, std::chrono::microseconds(200));
      }
      if (!aborted_) {
        lock.unlock();
        work->wait();
      }
    } catch (const std::exception&) {
      lock.lock();
      changed_.wait(lock, [&] { return aborted_; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool aborted_ = false;
};

std::mutex group_streams_mutex;
std::vector<std::pair<int, int64_t>> group_streams;

// Waiting queues a wait on the current stream; the host goes on.
class StreamWork final : public c10d::Work {
 public:
  StreamWork(Event event, Tensors tensors)
      : Work(-1, c10d::OpType::UNKNOWN), event_(std::move(event)), tensors_(std::move(tensors)) {
  }

  bool isCompleted() override {
    return event_.done();
  }
  bool isSuccess() const override {
    return true;
  }
  bool wait(std::chrono::milliseconds) override {
    const c10::DeviceGuard guard(tensors_.at(0).device());
    event_.block(current());
    return true;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  Tensors result() override {
    return tensors_;
  }

 private:
  Event event_;
  Tensors tensors_;
};

// NCCL: an operation that is not asynchronous runs on the current stream and returns no work; others run on a stream of
// the group. HCCL: all run on a stream of the group, between two event hops, and return a work.
class StreamBackend final : public c10d::Backend {
 public:
  StreamBackend(
      std::function<c10::intrusive_ptr<c10d::Backend>()> connect,
      int rank,
      int size,
      std::string name,
      std::vector<uint64_t> ranks,
      bool own_stream)
      : Backend(rank, size),
        connect_(std::move(connect)),
        name_(std::move(name)),
        options_(c10::make_intrusive<Options>(name_)),
        own_stream_(own_stream) {
    options_->global_ranks_in_group = std::move(ranks);
  }

  const std::string getBackendName() const override {
    return name_;
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return options_;
  }
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run("broadcast", {&tensors}, options.asyncOp, [options](auto& gloo, auto& on_host) {
      return gloo->broadcast(on_host[0], options);
    });
  }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return run("allreduce", {&tensors}, options.asyncOp, [options](auto& gloo, auto& on_host) {
      return gloo->allreduce(on_host[0], options);
    });
  }
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensors to{output}, from{input};
    return run("allgather", {&to, &from}, options.asyncOp, [options](auto& gloo, auto& on_host) {
      return gloo->_allgather_base(on_host[0][0], on_host[1][0], options);
    });
  }
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return run("allgather", {&outputs.at(0), &inputs}, options.asyncOp, [options](auto& gloo, auto& on_host) {
      std::vector<Tensors> to{on_host[0]};
      return gloo->allgather(to, on_host[1], options);
    });
  }
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors to{output}, from{input};
    return run("reduce_scatter", {&to, &from}, options.asyncOp, [options](auto& gloo, auto& on_host) {
      return gloo->_reduce_scatter_base(on_host[0][0], on_host[1][0], options);
    });
  }
  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    std::vector<Tensors*> all{&outputs};
    if (!inputs.empty()) {
      all.push_back(&inputs[0]);
    }
    return run("scatter", all, options.asyncOp, [options](auto& gloo, auto& on_host) {
      std::vector<Tensors> from(on_host.begin() + 1, on_host.end());
      return gloo->scatter(on_host[0], from, options);
    });
  }
  // As NCCL: sends and receives have no synchronous mode.
  Work send(Tensors& tensors, int to, int tag) override {
    return run("send", {&tensors}, true, [=](auto& gloo, auto& on_host) { return gloo->send(on_host[0], to, tag); });
  }
  Work recv(Tensors& tensors, int from, int tag) override {
    return run("recv", {&tensors}, true, [=](auto& gloo, auto& on_host) { return gloo->recv(on_host[0], from, tag); });
  }
  Work barrier(const c10d::BarrierOptions& options) override {
    return gloo()->barrier(options);
  }
  void abort() override {
    communicator_->abort();
  }

 private:
  struct Flat {
    void* data;
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
  };

  template <typename Call>
  Work run(const char* what, const std::vector<Tensors*>& lists, bool async, Call call) {
    const c10::DeviceGuard guard(lists.at(0)->at(0).device());
    const int index = device();
    auto& caller = current();
    const bool own = async || own_stream_;
    auto& ours = own ? internal(index) : caller;
    if (own) {
      Event before;
      before.record(caller);
      before.block(ours);
    }
    std::vector<std::vector<Flat>> flats;
    for (const auto* const list : lists) {
      auto& flat = flats.emplace_back();
      for (const auto& t : *list) {
        TORCH_CHECK(
            t.device() == lists[0]->at(0).device() && t.is_contiguous(),
            "fakeccl: expected contiguous tensors on one device of its kind, got one on ",
            t.device());
        flat.push_back({t.data_ptr(), t.sizes().vec(), t.scalar_type()});
      }
    }
    gloo();
    const bool ends_with_peers = std::string_view(what) == "broadcast" || std::string_view(what) == "allgather";
    ours.push(what, [gloo = gloo_, communicator = communicator_, ends_with_peers, flats, call] {
      const at::AutoDispatchBelowAutograd below;
      std::vector<Tensors> on_host;
      for (const auto& list : flats) {
        auto& tensors = on_host.emplace_back();
        for (const auto& flat : list) {
          tensors.push_back(at::from_blob(flat.data, flat.sizes, at::TensorOptions().dtype(flat.dtype)));
        }
      }
      if (ends_with_peers) {
        communicator->run([&] { return call(gloo, on_host); });
      } else { // of some of gloo's other collectives a part is done in the wait
        call(gloo, on_host)->wait();
      }
    });
    if (!own) {
      return {};
    }
    Event after;
    after.record(ours);
    return c10::make_intrusive<StreamWork>(std::move(after), *lists[0]);
  }

  // Connected by the first operation, which waits for all members, and which nothing ends if one does not come: as with
  // NCCL and HCCL.
  const c10::intrusive_ptr<c10d::Backend>& gloo() {
    const std::lock_guard<std::mutex> lock(connecting_);
    if (!gloo_) {
      gloo_ = connect_();
    }
    return gloo_;
  }

  Queue& internal(int index) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& found = internal_[index];
    if (found == nullptr) {
      const auto made = new_stream(index);
      found = &queue(made);
      const std::lock_guard<std::mutex> listing(group_streams_mutex);
      group_streams.emplace_back(index, made.id());
    }
    return *found;
  }

  const std::function<c10::intrusive_ptr<c10d::Backend>()> connect_;
  std::mutex connecting_;
  c10::intrusive_ptr<c10d::Backend> gloo_;
  const std::string name_;
  const c10::intrusive_ptr<Options> options_;
  const bool own_stream_;
  const std::shared_ptr<Communicator> communicator_ = std::make_shared<Communicator>();
  std::mutex mutex_;
  std::map<int, Queue*> internal_;
};

} // namespace

PYBIND11_MODULE(_fakedev, m) {
  m.def(
      "make_backend",
      [](const py::object& connect, int rank, int size, std::string name, std::vector<uint64_t> ranks, bool own_stream)
          -> c10::intrusive_ptr<c10d::Backend> {
        // Kept until the process ends, as it may be destroyed where Python cannot run.
        auto* const kept = new py::object(connect);
        const auto call = [kept] {
          const py::gil_scoped_acquire gil;
          return (*kept)().cast<c10::intrusive_ptr<c10d::Backend>>();
        };
        return c10::make_intrusive<StreamBackend>(call, rank, size, std::move(name), std::move(ranks), own_stream);
      });
  m.def("wedge_aborts", [](bool wedge) { aborts_wedge = wedge; });
  m.def("contexts", &contexts);
  m.def("hold", [](int device, int64_t stream) { queue(device, stream).hold(); });
  m.def("release", [](int device, int64_t stream) { queue(device, stream).release(); });
  m.def("group_streams", [] {
    const std::lock_guard<std::mutex> listing(group_streams_mutex);
    return group_streams;
  });
  m.def("start_trace", &start_trace);
  m.def("stop_trace", [] {
    std::vector<std::tuple<int, int64_t, std::string>> seen;
    for (const auto& t : stop_trace()) {
      seen.emplace_back(t.device, t.stream, t.what);
    }
    return seen;
  });
  m.def("drain", &drain, py::call_guard<py::gil_scoped_release>());
  m.def("divide", [](const std::vector<uint32_t>& numbers, uint32_t divisor) {
    const auto by = epload::cuda::Divider::of(divisor);
    std::vector<uint32_t> quotients;
    for (const auto n : numbers) {
      quotients.push_back(by.divide(n));
    }
    return quotients;
  });
  m.attr("DEVICES") = kDevices;
}

} // namespace fakedev
