#include "library.h"

#include "../beside.h"

namespace epload::npu {
namespace {

Library open_library() {
  const Beside beside(
      "libepload_npu.so",
      "epload_npu_interface",
      kEploadNpuInterface,
      "; rebuild epload with EPLOAD_NPU=1 against the torch_npu that runs");
  Library library;
  if (beside.present()) {
    beside.find(library.broadcast, "epload_npu_broadcast");
    beside.find(library.ranks, "epload_npu_ranks");
    beside.find(library.plain, "epload_npu_plain");
    beside.find(library.copy, "epload_npu_copy");
  }
  return library;
}

} // namespace

const Library& library() {
  static const Library opened = open_library();
  return opened;
}

} // namespace epload::npu
