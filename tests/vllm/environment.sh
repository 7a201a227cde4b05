#!/bin/bash
# Creates an environment with vLLM's Python code, Megatron-Core and a CPU build of torch:
# environment.sh DIRECTORY TORCH VLLM MEGATRON
# The wheels of vLLM need CUDA; its sdist can be installed without compiled ops.
set -euo pipefail
directory=$1 torch=$2 vllm=$3 megatron=$4
python=${PYTHON:-python3}

"$python" -m venv "$directory"
pip="$directory/bin/pip --disable-pip-version-check --quiet"
$pip install --upgrade pip
$pip install "$torch" numpy "setuptools==78.1.1" setuptools-scm wheel packaging ninja jinja2 setuptools-rust \
  "cmake>=3.22" "pybind11>=2.13" pytest pytest-timeout

export VLLM_TARGET_DEVICE=empty       # no compiled ops
export VLLM_VERSION_OVERRIDE=${vllm#*==} # else it appends the device, which pip takes for another version
source=$(mktemp --directory)
trap 'rm -rf "$source"' EXIT
$pip download --no-binary :all: --no-build-isolation --no-deps --dest "$source" "$vllm"
tar --extract --strip-components 1 --directory "$source" --file "$source"/vllm-*.tar.gz
$pip install --no-deps --no-build-isolation "$source"
# Its pin of certifi may be newer than what a package index has.
sed --in-place 's/^certifi.*/certifi/' "$source/requirements/common.txt"
$pip install --requirement "$source/requirements/common.txt" "$torch" peft
$pip install --no-deps "$megatron"
