"""Every recipe in ``examples/`` runs as its docstring says, with real libraries, and prints what is true.

The recipes that need Ray run in the tests of ``make test-verl``, whose environment has it.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from epload.core import log
from support import ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = sorted(path for path in EXAMPLES.glob("*.py") if path.stem not in ("tiny", "ray_actors"))

LOSS = r"loss (?P<first>\d+\.\d{4})"
"""Of the checkpoint's weights on fixed tokens, which is also computed here, without epload."""
LOADED = r" epload loaded \d+ tensors, .*; readers=one$"
TRAINED = rf"{LOSS}, (?P<later>\d+\.\d{{4}}) after 2 steps"
PRINTS = {
    "accelerate_fsdp2": TRAINED,
    "expert_parallel": LOSS,
    "fsdp2": LOSS,
    "hsdp": LOSS,
    "lightning_fsdp2": TRAINED,
    "lora_peft": TRAINED,
    "resume": rf"{LOSS}, (?P<later>\d+\.\d{{4}}) after 4 steps, (?P=later) if resumed after 2",
    "save": rf"{LOSS}, (?P<later>\d+\.\d{{4}}) when saved, (?P=later) of the saved model",
    "tensor_parallel": LOSS,
    "torchtitan_like": TRAINED,
    "trace": LOSS,
    "trainer": TRAINED,
}
"""What each recipe prints, in a line that one rank prints once."""
ALSO = {
    "accelerate_fsdp2": (r"^FSDPQwen3MoeForCausalLM on 2 ranks$", LOADED),
    "expert_parallel": (r"^4 of 8 experts on this rank$",),
    "lightning_fsdp2": (r"^loaded 25 tensors",),
    "save": (r"^saved 69 tensors",),
    "trace": (r"^epload/read/nbytes = \d+$",),
    "trainer": (r"^FSDPQwen3MoeForCausalLM on 2 ranks$", LOADED),
}
"""What can be seen besides, in what is printed or in the log of epload, each once."""
ON_ACCELERATORS = ("accelerate_fsdp2", "trainer")
"""Recipes for accelerators alone, to which the CPU is presented as one."""


def command(recipe: Path) -> tuple[int, list[str]]:
    """Returns the number of ranks and the arguments of the recipe, as its docstring has them."""
    docstring = ast.get_docstring(ast.parse(recipe.read_text())) or ""
    match = re.search(rf"^ *torchrun --standalone --nproc-per-node (\d+) examples/{recipe.name} (.*)$", docstring, re.M)
    assert match is not None, (
        f"expected a line 'torchrun ... examples/{recipe.name} ...' in the docstring of {recipe.name}"
    )
    return int(match[1]), match[2].split()


def be_quiet() -> None:
    transformers.logging.set_verbosity_error()
    log.configure()


def let_accelerate_shard_on_cpu() -> None:
    """accelerate ignores an FSDP plugin if there is no accelerator, although all that it does with one works over gloo."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    be_quiet()
    original = AcceleratorState.__init__

    def initialize(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if self.distributed_type == DistributedType.MULTI_CPU and fsdp_plugin is not None:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = initialize
    os.environ["ACCELERATE_USE_CPU"] = "true"


def loss_of(checkpoint: Path) -> float:
    """Of the unsharded model, loaded by transformers."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokens = torch.arange(64).reshape(2, 32)
    with torch.no_grad():
        return float(model(tokens, labels=tokens).loss)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints in ``tiny/``."""
    folder = tmp_path_factory.mktemp("examples")
    with mock.patch.object(sys, "argv", ["tiny.py", str(folder / "tiny")]):
        runpy.run_path(str(EXAMPLES / "tiny.py"), run_name="__main__")
    return folder


@pytest.fixture(scope="module")
def losses(checkpoints: Path) -> dict[str, float]:
    found = {kind: loss_of(checkpoints / "tiny" / kind) for kind in ("dense", "moe")}
    assert len({round(loss, 2) for loss in found.values()}) == 2
    return found


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_run_as_they_say(recipe: Path, checkpoints: Path, losses: dict[str, float]) -> None:
    assert recipe.stem in PRINTS, f"say in PRINTS what {recipe.name} prints"
    world, arguments = command(recipe)
    environment = {"EPLOAD_LOG": "info", "CUDA_VISIBLE_DEVICES": ""}
    prepare = let_accelerate_shard_on_cpu if recipe.stem in ON_ACCELERATORS else be_quiet
    output = ranks.run_script(world, recipe, arguments, checkpoints, environment, prepare)
    found = re.findall(r"^loss .*$", output, re.MULTILINE)
    assert len(found) == 1, f"expected one line with a loss, printed by one rank:\n{output}"
    line = re.fullmatch(PRINTS[recipe.stem], found[0])
    assert line is not None, f"expected {PRINTS[recipe.stem]!r}, got {found[0]!r}"
    numbers = {name: float(text) for name, text in line.groupdict().items()}
    kind = next(kind for kind in losses if f"tiny/{kind}" in arguments)
    assert numbers["first"] == pytest.approx(losses[kind], abs=2e-4)
    assert numbers.get("later", 0) < numbers["first"], "training does not lower the loss"
    assert len(re.findall(r"^(?:loaded|saved) \d+ tensors", output, re.MULTILINE)) <= 1, (
        "more ranks than one print a report"
    )
    assert [path for path in arguments if not (checkpoints / path).exists()] == []
    for pattern in ALSO.get(recipe.stem, ()):
        assert len(re.findall(pattern, output, re.MULTILINE)) == 1, f"expected one line with {pattern!r}:\n{output}"
