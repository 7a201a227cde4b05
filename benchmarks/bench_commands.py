"""Times the commands that read headers only, each as a process of its own, beside an import of torch.

    python benchmarks/bench_commands.py

The checkpoint has the names of Qwen3-30B-A3B's 18,867 tensors in 16 files, whose bytes are holes: nothing reads them. The peer
asks safetensors for the dtype and shape of each tensor, with NumPy. Commands run in turn, one after the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from summary import facts
from tables import Table, provenance, seconds, times, write

EXPERT = {"gate_proj": [768, 2048], "up_proj": [768, 2048], "down_proj": [2048, 768]}
ATTENTION = {
    "self_attn.q_proj": [4096, 2048], "self_attn.k_proj": [512, 2048], "self_attn.v_proj": [512, 2048],
    "self_attn.o_proj": [2048, 4096], "self_attn.q_norm": [128], "self_attn.k_norm": [128], "input_layernorm": [2048],
    "post_attention_layernorm": [2048], "mlp.gate": [128, 2048],
}  # fmt: skip
LAYERS, EXPERTS, FILES = 48, 128, 16
PEER = """
import glob, sys, safetensors
for path in glob.glob(sys.argv[1] + "/*.safetensors"):
    with safetensors.safe_open(path, framework="np") as file:
        for name in file.keys():
            part = file.get_slice(name)
            print(name, part.get_dtype(), part.get_shape())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--docs", action="store_true", help="write the table to benchmarks/results.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="epload-bench-") as folder:
        tensors, nbytes = make_checkpoint(Path(folder))
        epload = [sys.executable, "-m", "epload"]
        commands = {
            "`epload --help`": [*epload, "--help"],
            "`epload inspect`": [*epload, "inspect", folder],
            "`epload diff --headers`, with itself": [*epload, "diff", "--headers", folder, folder],
            "safetensors: dtypes and shapes": [sys.executable, "-c", PEER, folder],
            "`import torch`": [sys.executable, "-c", "import torch"],
        }
        medians = measure(commands, options.repeat)
    torch = medians["`import torch`"]
    rows = [[name, seconds(median), times(median / torch)] for name, median in medians.items()]
    table = Table("Commands: median seconds of a process", ("command", "s", "of `import torch`"), rows)
    table.show()
    if options.docs:
        write("commands", [provenance(facts(nbytes, tensors)), table.markdown()])


def make_checkpoint(folder: Path) -> tuple[int, int]:
    """Writes headers and holes. Returns the numbers of tensors and of bytes."""
    shapes = {
        "model.embed_tokens.weight": [151936, 2048],
        "lm_head.weight": [151936, 2048],
        "model.norm.weight": [2048],
    }
    for layer in range(LAYERS):
        parts = ATTENTION | {f"mlp.experts.{i}.{name}": EXPERT[name] for i in range(EXPERTS) for name in EXPERT}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    total = 0
    for number in range(FILES):
        header, end = {}, 0
        for name in list(shapes)[number::FILES]:
            nbytes = 2 * shapes[name][0] * (shapes[name][1] if len(shapes[name]) > 1 else 1)
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [end, end + nbytes]}
            end += nbytes
        raw = json.dumps(header).encode()
        with (folder / f"model-{number + 1:05}-of-{FILES:05}.safetensors").open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            file.truncate(8 + len(raw) + end)
        total += end
    return len(shapes), total


def measure(commands: dict[str, list[str]], repeat: int) -> dict[str, float]:
    """Returns the median seconds of each command, after one run that is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repeat + 1):
        for name, command in commands.items():
            began = time.monotonic()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            taken[name].append(time.monotonic() - began)
    return {name: statistics.median(values[1:]) for name, values in taken.items()}


if __name__ == "__main__":
    main()
