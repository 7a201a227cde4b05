// What the native code is fuzzed with: each case makes an input of arbitrary bytes, and must neither crash nor reach
// outside the memory that it was given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

// A copy table over tensors and a bucket that end where their memory does: refused, or carried out inside them.
void copy_table_case(const uint8_t* data, size_t size);

// Tensors for the bucket planner: refused, or every slot inside its bucket, aligned, in order, and all bytes covered.
void planner_case(const uint8_t* data, size_t size);

// Encoded changes: refused, with the buffer as it was, or applied inside it.
void changes_case(const uint8_t* data, size_t size);

// A pickle: refused, or it ends inside its bytes.
void pickles_case(const uint8_t* data, size_t size);

// Ends the program unless it holds.
inline void require(bool holds, const char* what) {
  if (!holds) {
    std::fprintf(stderr, "does not hold: %s\n", what);
    std::abort();
  }
}
