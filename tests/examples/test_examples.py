"""Every recipe in ``examples/`` runs as its docstring says, with real libraries, and prints what is true.

The recipes that need Ray run in the tests of ``make test-verl``, whose environment has it.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from epload.core import log
from support import ranks
from support.jobs import session

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs" / "recipes.md").read_text()
LIMIT = 300.0
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
    "own_model": rf"{LOSS}, (?P=first) of transformers' model of what was saved",
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
    "own_model": (r"^loaded 69 tensors",),
    "save": (r"^saved 69 tensors",),
    "trace": (r"^epload/read/nbytes = \d+$",),
    "trainer": (r"^FSDPQwen3MoeForCausalLM on 2 ranks$", LOADED),
}
"""What can be seen besides, in what is printed or in the log of epload, each once."""
ON_ACCELERATORS = ("accelerate_fsdp2", "trainer")
"""Recipes for accelerators alone, to which the CPU is presented as one."""


def docstring_of(recipe: Path) -> str:
    return ast.get_docstring(ast.parse(recipe.read_text())) or ""


def command(recipe: Path) -> tuple[int, list[str]]:
    """Returns the number of ranks and the arguments of the recipe, as its docstring has them."""
    match = re.search(
        rf"^ *torchrun --standalone --nproc-per-node (\d+) examples/{recipe.name} (.*)$", docstring_of(recipe), re.M
    )
    assert match is not None, f"expected a line 'torchrun ... examples/{recipe.name} ...' in the docstring of {recipe.name}"
    return int(match[1]), match[2].split()


def be_quiet() -> None:
    transformers.logging.set_verbosity_error()
    log.configure()


def let_accelerate_shard_on_cpu() -> None:
    """Presents the CPU as an accelerator.

    accelerate ignores an FSDP plugin if there is none, although all that it does with one works over gloo. The recipe asks
    torch first; all later calls get the true answer.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    from transformers import Trainer  # noqa: F401  # what it imports may ask torch, too

    be_quiet()
    is_available = torch.accelerator.is_available

    def is_available_once() -> bool:
        torch.accelerator.is_available = is_available
        return True

    torch.accelerator.is_available = is_available_once
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


def run_as_printed(commands: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs lines of a shell in a folder that has ``examples``, with this Python and what it imports. All that they start is
    ended at the limit."""
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(EXAMPLES)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {
        "PATH": path, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    shell = ["bash", "-c", "\n".join(["set -e", *commands])]
    with session(shell, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            stdout, stderr = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks, which are in sessions of their own
            process.communicate(timeout=60)
            raise
    return subprocess.CompletedProcess(shell, process.returncode, stdout, stderr)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints in ``tiny/``, made as docs/recipes.md says."""
    folder = tmp_path_factory.mktemp("examples")
    block = re.search(r"^```\n(.*)\n(.*)\n```$", PAGE, re.MULTILINE)
    assert block is not None
    done = run_as_printed([block[1]], folder)
    assert done.returncode == 0, done.stderr
    assert block[2] in docstring_of(EXAMPLES / "fsdp2.py").splitlines(), "run by test_recipes_run_as_they_say"
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
    assert len(re.findall(r"^(?:loaded|saved) \d+ tensors", output, re.MULTILINE)) <= 1, "more ranks than one print a report"
    assert [path for path in arguments if not (checkpoints / path).exists()] == []
    for pattern in ALSO.get(recipe.stem, ()):
        assert len(re.findall(pattern, output, re.MULTILINE)) == 1, f"expected one line with {pattern!r}:\n{output}"


@pytest.mark.parametrize("name", ON_ACCELERATORS)
def test_recipes_for_accelerators_say_so_and_stop(name: str, checkpoints: Path) -> None:
    recipe = EXAMPLES / f"{name}.py"
    assert docstring_of(recipe).startswith("Needs an accelerator: ")
    world, arguments = command(recipe)
    done = run_as_printed(
        [f"torchrun --standalone --nproc-per-node {world} examples/{recipe.name} {' '.join(arguments)}"], checkpoints
    )
    assert (done.returncode, done.stdout) == (1, "")
    sentences = re.findall(rf"^{recipe.name} needs an accelerator, and torch finds none: .*\.$", done.stderr, re.MULTILINE)
    assert 1 <= len(sentences) <= world, done.stderr  # torchrun ends the others once one has failed
    assert set(re.findall(r"^ *exitcode *: (\S+)", done.stderr, re.MULTILINE)) <= {"1", "-15"}
    assert recipe.name not in done.stderr.partition("Traceback")[2].partition("ChildFailedError")[0]


def test_recipes_are_short() -> None:
    long = [recipe.name for recipe in EXAMPLES.glob("*.py") if len(recipe.read_text().splitlines()) >= 70]
    assert long == ["own_model.py"]


def test_only_these_recipes_need_an_accelerator() -> None:
    named = {recipe.stem for recipe in RECIPES if "Needs an accelerator" in recipe.read_text()}
    assert named == set(ON_ACCELERATORS)
