// A copy table that is unpacked again and again, and what devices keep of it between the calls.
#pragma once

#include "region_copy.h"

#include <torch/custom_class.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace epload {

// Safe to use from several threads.
class RegionTable : public torch::CustomClassHolder {
 public:
  explicit RegionTable(const at::Tensor& copies);

  // `guard` may be null.
  void unpack(const at::Tensor& bucket, at::TensorList targets, const Guard* guard);
  bool can_guard(const at::Tensor& bucket, at::TensorList targets);

 private:
  // All that ready copies depend on, as numbers: no tensor is kept alive.
  using Key = std::vector<int64_t>;

  struct Kept {
    Key key;
    std::shared_ptr<const ReadyCopies> copies;
  };

  static Key key_of(const at::Tensor& bucket, at::TensorList targets);
  // Null where the device has no kernels.
  std::shared_ptr<const ReadyCopies> ready(const at::Tensor& bucket, at::TensorList targets);

  const std::vector<RegionCopy> copies_;
  std::mutex mutex_;
  Kept kept_; // a load has a bucket where the load before had it
};

// Once per process, before the first op that names it.
void register_region_table_class();

} // namespace epload
