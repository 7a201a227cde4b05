#!/usr/bin/env bash
# Builds a standalone program of the native code: build.sh PYTHON OUTPUT MAIN.cpp [FLAGS...]. CXX chooses the compiler.
set -euo pipefail
python=$1 output=$2 main=$3
shift 3
here=$(cd "$(dirname "$0")" && pwd)
csrc=$here/../../../csrc
torch=$("$python" -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')
mkdir -p "$(dirname "$output")"
sources=("$csrc"/cpu/*.cpp "$csrc"/device/{crossing,pinned,pipe}.cpp "$csrc"/comm/board.cpp
  "$csrc"/{bucket_plan,changes,copy_table,digest,pickles,region_copy,schedule,strided,tensor_memory}.cpp
  "$here/cases.cpp" "$here/$main")
unit=$(mktemp --suffix=.cpp)
trap 'rm -f "$unit"' EXIT
# One source, as torch's headers take longer to parse than all of these to compile.
printf '#include "%s"\n' "${sources[@]}" > "$unit"
"${CXX:-c++}" -std=c++20 -O1 -g -fno-omit-frame-pointer "$@" -isystem "$torch/include" \
  -isystem "$torch/include/torch/csrc/api/include" "$unit" "$torch/lib/libc10.so" "$torch/lib/libtorch_cpu.so" \
  -Wl,-rpath,"$torch/lib" -pthread -o "$output"
