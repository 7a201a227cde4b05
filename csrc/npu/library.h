// libepload_npu as libepload sees it.
#pragma once

#include "api.h"

namespace epload::npu {

struct Library {
  decltype(&epload_npu_broadcast) broadcast = nullptr; // all null in a build without it
  decltype(&epload_npu_drain) drain = nullptr;
  decltype(&epload_npu_ranks) ranks = nullptr;
  decltype(&epload_npu_plain) plain = nullptr;
  decltype(&epload_npu_copy) copy = nullptr;
};

// Opened by the first call. Throws c10::Error when it is there but does not load.
const Library& library();

} // namespace epload::npu
