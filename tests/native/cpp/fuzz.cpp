// For AFL++: `fuzz copy_table` or `fuzz planner` runs one case on what it reads from standard input.
#include "cases.h"

#include <cstdio>
#include <cstring>
#include <vector>

#ifndef __AFL_LOOP
#define __AFL_LOOP(count) (once++ == 0)
#endif

int main(int argc, char** argv) {
  if (argc != 2 || (std::strcmp(argv[1], "copy_table") != 0 && std::strcmp(argv[1], "planner") != 0)) {
    std::fprintf(stderr, "usage: fuzz copy_table|planner < input\n");
    return 2;
  }
  const auto run = std::strcmp(argv[1], "planner") == 0 ? planner_case : copy_table_case;
  [[maybe_unused]] int once = 0;
  while (__AFL_LOOP(10000)) {
    std::vector<uint8_t> data(4096);
    data.resize(std::fread(data.data(), 1, data.size(), stdin));
    run(data.data(), data.size());
  }
}
