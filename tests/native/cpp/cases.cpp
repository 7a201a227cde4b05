#include "cases.h"

#include "../../../csrc/bucket_plan.h"
#include "../../../csrc/changes.h"
#include "../../../csrc/device/crossing.h"
#include "../../../csrc/digest.h"
#include "../../../csrc/pickles.h"
#include "../../../csrc/region_copy.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace {

// Numbers out of arbitrary bytes; zeros when they are used up.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), left_(size) {
  }

  uint8_t byte() {
    if (left_ == 0) {
      return 0;
    }
    --left_;
    return *data_++;
  }

  int64_t below(int64_t limit) {
    return byte() % limit;
  }

  // Mostly small, sometimes any number at all.
  int64_t number() {
    const auto kind = byte();
    if (kind < 200) {
      return kind % 12;
    }
    if (kind < 220) {
      return -static_cast<int64_t>(byte());
    }
    uint64_t value = 0;
    for (int i = 0; i < 8; ++i) {
      value = value << 8 | byte();
    }
    return static_cast<int64_t>(value);
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

// Block of just so many bytes, so that a sanitizer sees whatever reaches past them.
using Block = std::unique_ptr<uint8_t, decltype(&std::free)>;

Block exactly(size_t nbytes) {
  Block memory(static_cast<uint8_t*>(std::malloc(nbytes + (nbytes == 0))), &std::free);
  std::memset(memory.get(), 0x11, nbytes);
  return memory;
}

constexpr std::array kDtypes = {at::kFloat, at::kByte, at::kShort, at::kBFloat16, at::kDouble};

// A file of the same bytes as the bucket fills the tensors as the bucket did.
void file_case(
    const at::Tensor& bucket, const std::vector<at::Tensor>& tensors, const std::vector<epload::RegionCopy>& copies) {
  const int file = memfd_create("bucket", 0);
  require(write(file, bucket.const_data_ptr(), bucket.nbytes()) == static_cast<ssize_t>(bucket.nbytes()), "a file");
  const std::vector<int64_t> files(copies.size());
  std::vector<std::vector<uint8_t>> expected;
  for (const auto& tensor : tensors) {
    const auto* const bytes = static_cast<const uint8_t*>(tensor.const_data_ptr());
    expected.emplace_back(bytes, bytes + tensor.nbytes());
  }
  for (const auto& tensor : tensors) {
    if (tensor.nbytes() > 0) {
      std::memset(tensor.data_ptr(), 0x11, tensor.nbytes());
    }
  }
  const epload::Crossing crossing(files, tensors, copies, epload::Direction::kUnpack, 4096, 4096);
  epload::OpenFiles open("cases", file);
  require(crossing.run(1, tensors, [&] { return open.reader(); }, epload::kGapBytes), "all is read");
  close(file);
  // Random rows may lie on one another, and are read in the order of the file.
  for (size_t i = 0; copies.size() == 1 && i < tensors.size(); ++i) {
    require(
        std::equal(expected[i].begin(), expected[i].end(), static_cast<const uint8_t*>(tensors[i].const_data_ptr())),
        "reads fill as copies do");
  }
}

} // namespace

void copy_table_case(const uint8_t* data, size_t size) {
  Input input(data, size);
  std::vector<Block> memories;
  std::vector<at::Tensor> tensors;
  for (int64_t i = 1 + input.below(3); i > 0; --i) {
    const auto dtype = kDtypes.at(input.below(kDtypes.size()));
    std::vector<int64_t> shape;
    for (int64_t d = input.below(4); d > 0; --d) {
      shape.push_back(input.below(5));
    }
    const auto count = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    memories.push_back(exactly(count * c10::elementSize(dtype)));
    tensors.push_back(at::from_blob(memories.back().get(), shape, at::TensorOptions().dtype(dtype)));
  }
  const int64_t nbytes = input.below(256);
  memories.push_back(exactly(nbytes));
  const auto bucket = at::from_blob(memories.back().get(), {nbytes}, at::TensorOptions().dtype(at::kByte));
  const int64_t dims = input.below(4);
  const auto table = at::empty({input.below(6), 4 + 3 * dims}, at::kLong);
  auto* entry = table.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < table.numel(); ++i) {
    entry[i] = input.number();
  }
  for (int64_t row = 0; row < table.size(0); ++row) { // or hardly any row would be a good one
    auto* const code = entry + row * (4 + 3 * dims) + 2;
    if (*code >= 0 && *code < 12) {
      *code = static_cast<int64_t>(kDtypes.at(*code % kDtypes.size()));
    }
  }
  try {
    const auto copies = epload::decode_copies(bucket, tensors, table);
    epload::region_copy(bucket, tensors, copies, epload::Direction::kUnpack);
    file_case(bucket, tensors, copies);
    const auto in_tensors = epload::digest_tensors(tensors, table);
    for (size_t i = 0; i < copies.size(); ++i) {
      table.mutable_data_ptr<int64_t>()[i * table.size(1)] =
          static_cast<int64_t>(tensors[copies[i].tensor].scalar_type());
    }
    const auto in_bucket = epload::digest_bucket(bucket, table);
    require(copies.size() != 1 || in_tensors.equal(in_bucket), "what was unpacked has the digest of the bucket");
    epload::region_copy(bucket, tensors, copies, epload::Direction::kPack);
  } catch (const c10::Error&) {
    // refused
  }
}

void planner_case(const uint8_t* data, size_t size) {
  Input input(data, size);
  std::vector<epload::TensorExtent> tensors;
  const auto blocks = input.number();
  const auto capacity = blocks > -1000 && blocks < int64_t{1} << 40 ? blocks * 16 : blocks;
  const auto alignment = int64_t{1} << input.below(6);
  const auto header = input.below(80);
  for (int64_t i = input.below(8); i > 0; --i) {
    if (input.below(2) == 0) {
      tensors.push_back({input.number(), input.number(), input.number()});
      continue;
    }
    std::array<int64_t, 3> shape{};
    for (auto& extent : shape) {
      extent = input.number();
    }
    try {
      tensors.push_back(epload::extent_of(shape.data(), input.below(4), 1 << input.below(4), capacity - header));
    } catch (const std::invalid_argument&) {
      return;
    }
  }
  for (const auto& tensor : tensors) {
    const bool many = tensor.nbytes > int64_t{1} << 16;
    if (many && (capacity < tensor.nbytes >> 8 || (tensor.slab > 0 && tensor.slab < tensor.nbytes >> 16))) {
      return; // more slots than fit into the time of a test; no shape has so many slabs that do not fill a bucket each
    }
  }
  epload::BucketPlan plan;
  try {
    plan = epload::plan_buckets(tensors, capacity, alignment, header);
  } catch (const std::invalid_argument&) {
    return;
  }
  std::vector<int64_t> covered(tensors.size());
  int64_t tensor = 0;
  std::vector<int64_t> filled(plan.bucket_nbytes.size(), header);
  for (const auto& slot : plan.slots) {
    require(slot.tensor >= tensor && slot.tensor < static_cast<int64_t>(tensors.size()), "slots in tensor order");
    tensor = slot.tensor;
    require(slot.tensor_offset == covered[tensor] && slot.nbytes > 0, "pieces that follow one another");
    covered[tensor] += slot.nbytes;
    require(slot.bucket >= 0 && slot.bucket < static_cast<int64_t>(filled.size()), "a bucket that exists");
    require(slot.bucket_offset % alignment == 0 && slot.bucket_offset >= filled[slot.bucket], "aligned, no overlap");
    filled[slot.bucket] = slot.bucket_offset + slot.nbytes;
    require(filled[slot.bucket] <= plan.bucket_nbytes[slot.bucket], "inside the bucket");
    require(plan.bucket_nbytes[slot.bucket] <= capacity, "no bucket above the capacity");
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    require(covered[i] == tensors[i].nbytes, "all bytes of all tensors");
  }
}

void changes_case(const uint8_t* data, size_t size) {
  Input in(data, size);
  // Half of the inputs begin with the header of a block, so that the rest of them is looked at.
  const int64_t unit = int64_t{1} << in.below(4);
  const bool valid_header = in.below(2) != 0;
  const int64_t nbytes = unit * (in.byte() + in.byte() * in.below(3));
  std::vector<uint8_t> bytes;
  if (valid_header) {
    bytes = {'e', 'p', 'l', 'd', 1, static_cast<uint8_t>(unit), 0, 0};
    for (int i = 0; i < 8; ++i) {
      bytes.push_back(static_cast<uint8_t>(nbytes >> 8 * i));
    }
  }
  const size_t used = std::min<size_t>(size, 6);
  bytes.insert(bytes.end(), data + used, data + size);
  const auto encoded_memory = exactly(bytes.size());
  std::copy(bytes.begin(), bytes.end(), encoded_memory.get());
  const auto base_memory = exactly(static_cast<size_t>(nbytes));
  const auto encoded = at::from_blob(encoded_memory.get(), {static_cast<int64_t>(bytes.size())}, at::kByte);
  auto base = at::from_blob(base_memory.get(), {nbytes}, at::kByte);
  int64_t changes = -1;
  try {
    changes = epload::check_changes(encoded, nbytes);
  } catch (const c10::Error&) { // NOLINT(bugprone-empty-catch)
  }
  try {
    require(epload::apply_changes(encoded, base) == changes, "what was checked is applied");
  } catch (const c10::Error&) {
    require(changes < 0, "what was checked is not refused");
    const auto* const memory = base_memory.get();
    require(std::all_of(memory, memory + nbytes, [](uint8_t byte) { return byte == 0x11; }), "nothing by halves");
  }
}

void pickles_case(const uint8_t* data, size_t size) {
  static constexpr char kOpcodes[] = "NK\1)(t\x85\x86]}aesubq\0h\0h\1\x94Q(h\2h\2t.";
  const std::string raw(reinterpret_cast<const char*>(data), size);
  auto program = raw; // of opcodes that do something, as hardly any of random bytes do
  for (auto& byte : program) {
    byte = kOpcodes[static_cast<unsigned char>(byte) % (sizeof(kOpcodes) - 1)];
  }
  for (const auto& pickle : {raw, program}) {
    try {
      require(epload::check_pickle(pickle, 0, nullptr) <= pickle.size(), "it ends inside its bytes");
    } catch (const std::invalid_argument&) {
      // refused
    }
  }
}
