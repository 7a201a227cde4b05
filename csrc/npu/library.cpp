#include "library.h"

#include "../sibling_library.h"

namespace epload::npu {
namespace {

Library open_library() {
  const SiblingLibrary sibling(
      "libepload_npu.so",
      "epload_npu_interface",
      kEploadNpuInterface,
      "; rebuild epload with EPLOAD_NPU=1 against the torch_npu that runs");
  Library library;
  if (sibling.present()) {
    sibling.find(library.broadcast, "epload_npu_broadcast");
    sibling.find(library.drain, "epload_npu_drain");
    sibling.find(library.ranks, "epload_npu_ranks");
    sibling.find(library.plain, "epload_npu_plain");
    sibling.find(library.copy, "epload_npu_copy");
  }
  return library;
}

} // namespace

const Library& library() {
  static const Library opened = open_library();
  return opened;
}

} // namespace epload::npu
