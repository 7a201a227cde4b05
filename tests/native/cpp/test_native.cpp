// The native code without Python, to be run under sanitizers: the fuzzed cases on a corpus and on random bytes, and
// a board and a region copy that several threads work on.
#include "cases.h"

#include "../../../csrc/comm/board.h"
#include "../../../csrc/device/crossing.h"
#include "../../../csrc/region_copy.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

using Case = void (*)(const uint8_t*, size_t);

size_t replay(Case run, const std::filesystem::path& folder) {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream file(entry.path(), std::ios::binary);
    const std::vector<char> data((std::istreambuf_iterator<char>(file)), {});
    run(reinterpret_cast<const uint8_t*>(data.data()), data.size());
    ++count;
  }
  return count;
}

void random_bytes(Case run, std::mt19937& random, int count) {
  for (int i = 0; i < count; ++i) {
    std::vector<uint8_t> data(random() % 300);
    for (auto& byte : data) {
      byte = static_cast<uint8_t>(random());
    }
    run(data.data(), data.size());
  }
}

// Two stages hand a buffer to and fro by the board alone: under ThreadSanitizer, its posts must order their accesses.
void handing_over() {
  constexpr int kTurns = 2000;
  const auto board = at::zeros({epload::kBoardFixedWords + 2}, at::kInt);
  int64_t shared = 0;
  std::thread other([&] {
    for (int turn = 1; turn <= kTurns; ++turn) {
      require(epload::board_wait(board, {0}, turn, 60) == epload::kBoardReached, "handed over");
      ++shared;
      epload::board_post(board, 1, turn);
    }
  });
  for (int turn = 1; turn <= kTurns; ++turn) {
    ++shared;
    epload::board_post(board, 0, turn);
    require(epload::board_wait(board, {1}, turn, 60) == epload::kBoardReached, "handed back");
  }
  other.join();
  require(shared == 2 * kTurns, "every turn taken once");
}

void failing() {
  const auto board = at::zeros({epload::kBoardFixedWords + 1}, at::kInt);
  std::atomic<bool> quit{false};
  std::vector<std::thread> waiters;
  for (int i = 0; i < 3; ++i) {
    waiters.emplace_back(
        [&] { require(epload::board_wait(board, {0}, 1, 60) == epload::kBoardFailed, "told of the failure"); });
    waiters.emplace_back([&] { require(epload::board_wait_failure(board, quit), "told of the failure"); });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  epload::board_post(board, -1, 1);
  for (auto& waiter : waiters) {
    waiter.join();
  }
  const auto calm = at::zeros({epload::kBoardFixedWords}, at::kInt);
  std::thread sentry([&] { require(!epload::board_wait_failure(calm, quit), "let go without a failure"); });
  quit = true;
  epload::board_nudge(calm);
  sentry.join();
}

// Torch's own threads are left out of it: its library is not built for ThreadSanitizer.
void several_threads() {
  const int64_t rows = 3000, columns = 5000; // above the bytes at which a second thread is taken
  const auto values = at::empty({rows * columns}, at::kInt);
  const auto tensor = at::empty({rows, columns}, at::kInt);
  auto* const numbers = values.mutable_data_ptr<int32_t>();
  std::iota(numbers, numbers + rows * columns, 7);
  const auto bucket = values.view(at::kByte);
  const auto table = at::empty({1, 10}, at::kLong);
  const std::vector<int64_t> row = {0, 0, static_cast<int64_t>(at::kInt), 2, 0, 0, rows, columns, columns, 1};
  std::copy(row.begin(), row.end(), table.mutable_data_ptr<int64_t>());
  at::set_num_threads(2);
  epload::region_copy(bucket, {tensor}, epload::decode_copies(bucket, {tensor}, table), epload::Direction::kUnpack);
  require(std::memcmp(tensor.const_data_ptr(), numbers, values.nbytes()) == 0, "two threads copy as one");
}

// Past the page cache where the file system allows it, by two threads, and in pieces that begin and end anywhere.
void cold_file() {
  const int64_t nbytes = (9 << 20) + 123;
  const auto bytes = at::empty({nbytes}, at::kByte);
  auto* const expected = static_cast<char*>(bytes.mutable_data_ptr());
  for (int64_t i = 0; i < nbytes; ++i) {
    expected[i] = static_cast<char>(i * 7 + i / 251);
  }
  char path[] = "/tmp/epload-native-XXXXXX";
  const int file = mkstemp(path);
  unlink(path);
  require(write(file, expected, nbytes) == nbytes, "a file");
  const auto buffer = at::empty({nbytes}, at::kByte);
  auto* const memory = static_cast<char*>(buffer.mutable_data_ptr());
  for (const bool cold : {true, false}) {
    if (cold) {
      fsync(file);
      posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    }
    std::memset(memory, 0, nbytes);
    const int64_t cut = (5 << 20) + 77;
    std::vector<epload::RegionCopy> copies;
    for (const auto& [at, size] :
         {std::pair{cut, nbytes - cut}, {int64_t{0}, int64_t{100}}, {int64_t{100}, cut - 100}}) {
      copies.push_back({0, at, at::kByte, {at}, {size}, {1}});
    }
    const epload::Crossing crossing({0, 0, 0}, buffer, copies, epload::Direction::kUnpack, 1 << 20, 4 << 20);
    epload::OpenFiles open("cold_file", file, true);
    require(crossing.run(2, buffer, [&] { return open.reader(); }, epload::kGapBytes), "all is read");
    require(std::memcmp(memory, expected, nbytes) == 0, "what is in the file");
  }
  close(file);
}

} // namespace

int main(int argc, char** argv) {
  const auto corpus = std::filesystem::path(argc > 1 ? argv[1] : "tests/native/cpp/corpus");
  const unsigned seed = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 0;
  const int count = argc > 3 ? std::atoi(argv[3]) : 3000;
  std::mt19937 random(seed);
  const auto tables = replay(copy_table_case, corpus / "copy_table");
  const auto plans = replay(planner_case, corpus / "planner");
  const auto changes = replay(changes_case, corpus / "changes");
  const auto pickles = replay(pickles_case, corpus / "pickles");
  random_bytes(copy_table_case, random, count);
  random_bytes(planner_case, random, count);
  random_bytes(changes_case, random, count);
  random_bytes(pickles_case, random, count);
  handing_over();
  failing();
  several_threads();
  cold_file();
  const auto replayed = tables + plans + changes + pickles;
  std::printf("%zu inputs of the corpus and 4 x %d random ones (seed %u): fine\n", replayed, count, seed);
}
