#!/bin/bash
# Creates an environment with SGLang's Python code, Megatron-Core and a CPU build of torch:
# environment.sh DIRECTORY TORCH SGLANG MEGATRON
# SGLang requires another torch and CUDA kernels: it is installed without its requirements, which are listed here.
set -euo pipefail
directory=$1 torch=$2 sglang=$3 megatron=$4
python=${PYTHON:-python3}
here=$(cd "$(dirname "$0")" && pwd)

"$python" -m venv "$directory"
pip="$directory/bin/pip --disable-pip-version-check --quiet"
$pip install --upgrade pip
constraint=$(mktemp)
trap 'rm -f "$constraint"' EXIT
echo "$torch" > "$constraint"
$pip install --constraint "$constraint" torch numpy pytest "transformers>=5.23,<5.24" triton==3.7.1 aiohttp apache-tvm-ffi==0.1.11 \
  blobfile==3.0.0 datasets dill einops fastapi gguf interegular ipython "llguidance>=1.7.6,<2" "mistral_common>=1.11.5" msgspec \
  openai==2.8.0 openai-harmony==0.0.4 orjson outlines==0.1.11 partial_json_parser pillow "prometheus-client>=0.20.0" psutil \
  pybase64 python-multipart pyzmq requests scipy sentencepiece==0.2.1 setproctitle tiktoken uvicorn uvloop xgrammar==0.2.7 xxhash \
  easydict nvidia-ml-py loguru soundfile==0.13.1
$pip install --no-deps "$sglang" "$megatron" compressed-tensors==0.18.0 torchvision==0.28.0

packages=$("$directory/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
cp -r "$here/standins/sgl_kernel" "$packages"
# torchvision's compiled operations need CUDA; it asks only for these to exist.
if ! grep --quiet _operations "$packages/torchvision/__init__.py"; then
  cat - "$packages/torchvision/__init__.py" > "$packages/torchvision/patched" <<'PYTHON'
import torch

_operations = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    _operations.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
PYTHON
  mv "$packages/torchvision/patched" "$packages/torchvision/__init__.py"
fi
# epload is not installed in this environment; its plugin is found by its entry point.
plugin=$packages/epload_plugin-0.dist-info
mkdir -p "$plugin"
printf 'Metadata-Version: 2.1\nName: epload-plugin\nVersion: 0\n' > "$plugin/METADATA"
sed -n '/^\[project.entry-points."sglang.srt.plugins"\]/,/^$/p' "$here/../../pyproject.toml" |
  sed 's/^\[project.entry-points."\(.*\)"\]/[\1]/; s/"//g' > "$plugin/entry_points.txt"
