#!/usr/bin/env bash
# Builds a standalone program of the native code: build.sh PYTHON OUTPUT MAIN.cpp [FLAGS...]. CXX chooses the compiler.
set -euo pipefail
python=$1 output=$2 main=$3
shift 3
here=$(cd "$(dirname "$0")" && pwd)
csrc=$here/../../../csrc
torch=$("$python" -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
mkdir -p "$(dirname "$output")"
sources=("$here/$main" "$here/cases.cpp" "$csrc"/cpu/*.cpp "$csrc"/comm/board.cpp
  "$csrc"/{bucket_plan,checksum,copy_table,digest,region_copy,safetensors_header,schedule,strided,tensor_memory}.cpp)
compile=("${CXX:-c++}" -std=c++20 -O1 -g -fno-omit-frame-pointer "$@"
  -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include")
printf '%s\n' "${sources[@]}" |
  xargs -P "$(nproc)" -I{} sh -c 'in=$1 out=$2/$(echo "$1" | tr / _).o; shift 2; exec "$@" -c "$in" -o "$out"' _ {} "$objects" "${compile[@]}"
"${CXX:-c++}" "$@" "$objects"/*.o "$torch/lib/libc10.so" "$torch/lib/libtorch_cpu.so" -Wl,-rpath,"$torch/lib" -pthread -o "$output"
