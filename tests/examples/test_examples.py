"""Every recipe in ``examples/`` runs as its docstring says, with real libraries, and prints what is true.

The recipes that need Ray run in the tests of ``make test-verl``, whose environment has it.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

EXAMPLES = Path(__file__).parents[2] / "examples"
RUNNER = Path(__file__).with_name("run_recipe.py")
RECIPES = sorted(path for path in EXAMPLES.glob("*.py") if path.stem not in ("tiny", "ray_actors"))
LINES = 60
LIMIT = 120.0
"""Seconds that a recipe may take, far more than on an idle machine."""

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


def command(recipe: Path) -> tuple[list[str], list[str]]:
    """The options of torchrun and the arguments of the recipe, as its docstring has them."""
    docstring = ast.get_docstring(ast.parse(recipe.read_text())) or ""
    match = re.search(rf"^ *torchrun (.*) examples/{recipe.name} (.*)$", docstring, re.MULTILINE)
    assert match is not None, (
        f"expected a line 'torchrun ... examples/{recipe.name} ...' in the docstring of {recipe.name}"
    )
    return match[1].split(), match[2].split()


def run(arguments: list[str], folder: Path) -> tuple[str, str]:
    """What a recipe prints, and that together with its log. It and its ranks are ended after ``LIMIT``."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "EPLOAD_LOG": "info",
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    launch = [sys.executable, "-m", "torch.distributed.run", *arguments]
    with (folder / "stderr").open("w+") as errors:
        process = subprocess.Popen(
            launch,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=LIMIT)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        errors.seek(0)
        log = errors.read()
    assert process.returncode == 0, f"{output}\n{log[-5000:]}"
    return output, output + log


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
    options, arguments = command(recipe)
    flags = ["--fsdp-on-cpu"] if recipe.stem in ON_ACCELERATORS else []
    output, log = run([*options, str(RUNNER), *flags, str(recipe), *arguments], checkpoints)
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
        assert len(re.findall(pattern, log, re.MULTILINE)) == 1, f"expected one line with {pattern!r}:\n{log}"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_recipes_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < LINES
