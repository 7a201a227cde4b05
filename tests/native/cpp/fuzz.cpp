// For AFL++: `fuzz copy_table` and the like runs one case on what it reads from standard input.
#include "cases.h"

#include <cstdio>
#include <map>
#include <string>
#include <vector>

#ifndef __AFL_LOOP
#define __AFL_LOOP(count) (once++ == 0)
#endif

int main(int argc, char** argv) {
  const std::map<std::string, void (*)(const uint8_t*, size_t)> cases{
      {"copy_table", copy_table_case}, {"planner", planner_case}, {"changes", changes_case}, {"pickles", pickles_case}};
  const auto found = argc == 2 ? cases.find(argv[1]) : cases.end();
  if (found == cases.end()) {
    std::fprintf(stderr, "usage: fuzz copy_table|planner|changes|pickles < input\n");
    return 2;
  }
  const auto run = found->second;
  [[maybe_unused]] int once = 0;
  while (__AFL_LOOP(10000)) {
    std::vector<uint8_t> data(4096);
    data.resize(std::fread(data.data(), 1, data.size(), stdin));
    run(data.data(), data.size());
  }
}
