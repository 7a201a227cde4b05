"""epload works with nothing installed but what its package requires: torch does without NumPy, for example."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement

import epload

PROGRAM = """
import sys

sys.modules.update(dict.fromkeys(sys.argv[2].split(",")))  # which cannot be imported, and are not found

import torch
import torch.distributed.checkpoint as dcp
import epload
from epload.cli.main import main
from torch import nn

def build():
    return nn.Sequential(nn.Linear(30, 50), nn.BatchNorm1d(50), nn.Linear(50, 7, dtype=torch.bfloat16))

def check(source, **options):
    with torch.device("meta"):
        loaded = build()
    epload.load(loaded, source, **options)
    expected, found = model.state_dict(), loaded.state_dict()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), (source, name)

folder, model = sys.argv[1], build()
epload.save(model, f"{folder}/saved", checksums=True)
check(f"{folder}/saved", verify=True)
epload.save_async(model, f"{folder}/async").wait()
check(f"{folder}/async")
check(model.state_dict())
dcp.save(model.state_dict(), checkpoint_id=f"{folder}/dcp")
check(f"{folder}/dcp")
torch.save(model.state_dict(), f"{folder}/model.pt")
check(f"{folder}/model.pt")
for command in (["inspect", f"{folder}/saved"], ["verify", f"{folder}/saved", "--checksums", "published"],
                ["diff", f"{folder}/model.pt", f"{folder}/saved"], ["convert", f"{folder}/dcp", f"{folder}/converted"],
                ["plan", f"{folder}/saved", "--model", "__main__:build"], ["doctor"], ["info"]):
    try:
        main(command)
    except SystemExit as end:
        assert not end.code or command == ["doctor"], command  # which looks at the machine
check(f"{folder}/converted")
with torch.no_grad():
    model[0].weight[3] += 1
epload.save(model, f"{folder}/changes", base=f"{folder}/saved")
check(f"{folder}/changes", verify=True)
with torch.device("meta"):
    larger = build().append(nn.Linear(7, 7))
try:  # it notes what it leaves without values
    epload.load(larger, f"{folder}/saved", strict=False, init_missing=lambda *unused: fail)
except epload.LoadError as error:
    assert "'fail' is not defined" in str(error), error
print("all done")
"""


def required(name: str) -> set[str]:
    """Returns the distributions that one requires, itself included, without extras."""
    found, queue = set(), [name]
    while queue:
        if (name := queue.pop().lower().replace("_", "-")) not in found:
            found.add(name)
            needs = [Requirement(text) for text in requires(name) or []]
            queue += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


def test_with_nothing_but_what_the_package_requires(tmp_path: Path) -> None:
    allowed = required("epload")
    refused = [
        module
        for module, distributions in packages_distributions().items()
        if allowed.isdisjoint(name.lower().replace("_", "-") for name in distributions)
    ]
    assert {"numpy", "safetensors", "transformers"} < set(refused)
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path), ",".join(refused)]
    environment = {**os.environ, "PYTHONPATH": str(Path(epload.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.endswith("all done\n"), done.stdout + done.stderr
