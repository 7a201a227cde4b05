"""Models on the Hugging Face Hub, from a server on loopback: what is downloaded, by whom, and what goes wrong."""

from __future__ import annotations

import errno
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from click.testing import CliRunner
from huggingface_hub import HfApi, constants
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import epload
from epload import Checkpoint, CheckpointError, HierarchicalLoader, Topology
from epload.checkpoint import hub
from epload.checkpoint.opening import join_source
from epload.cli.main import main
from epload.mapping import Quantize
from support import ranks
from support.checkpoints import assert_same, index, read_all, tensor
from support.checks import all_fine
from support.failures import must_raise
from support.hub_server import COMMIT, TOKEN, HubServer, pointing, serving
from support.small_model import NODES, meta_net, state_for, wrong

STATE = {"weight": tensor(1, (4, 3)), "bias": tensor(2, (4,))}
SMALL = Qwen3Config(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8,
    vocab_size=8,
)  # fmt: skip
VARIANT = {"weight": tensor(3, (4, 3)), "bias": tensor(4, (4,))}


def _others(folder: Path) -> None:
    for name in (
        "README.md", "tokenizer.json", "generation_config.json", "logo.png", "onnx/model.bin", "original/a.safetensors",
    ):  # fmt: skip
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not for loading")
    (folder / "config.json").write_text('{"model_type": "none"}')


def _one_file(folder: Path) -> str:
    save_file(STATE, folder / "model.safetensors")
    torch.save({}, folder / "pytorch_model.bin")
    save_file({"x": torch.ones(1)}, folder / "consolidated.safetensors")
    return "model.safetensors"


def _indexed(folder: Path) -> str:
    files = {"weight": "model-1-of-2.safetensors", "bias": "model-2-of-2.safetensors"}
    for name, file in files.items():
        save_file({name: STATE[name]}, folder / file)
    index(folder, {"weight_map": files})
    save_file({"x": torch.ones(1)}, folder / "consolidated.safetensors")
    return f"{' '.join(files.values())} model.safetensors.index.json"


def _torch_and_others(folder: Path) -> str:
    """Files that transformers would not load are not downloaded either."""
    torch.save(STATE, folder / "pytorch_model.bin")
    torch.save({}, folder / "training_args.bin")
    save_file({"x": torch.ones(1)}, folder / "adapter_model.safetensors")
    save_file(VARIANT, folder / "model.fp16.safetensors")
    return "pytorch_model.bin"


def _named_by_config(folder: Path) -> str:
    _one_file(folder)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "config.json").write_text('{"transformers_weights": "other.safetensors"}')
    return "other.safetensors"


def _dcp(folder: Path) -> str:
    torch.distributed.checkpoint.save(STATE, checkpoint_id=str(folder), no_dist=True)
    return ".metadata __0_0.distcp"


def _adapter(folder: Path) -> str:
    """The configuration has the scale, which a load compares with the model's."""
    save_file(STATE, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    return "adapter_model.safetensors adapter_config.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "served"
    folder.mkdir()
    _others(folder)
    _one_file(folder)
    return folder


@pytest.mark.parametrize("made", [_one_file, _indexed, _torch_and_others, _named_by_config, _dcp, _adapter])
def test_only_weights_index_and_config_come(made: Callable[[Path], str], tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    _others(tmp_path / "served")
    expected = [*made(tmp_path / "served").split(), "config.json"]
    with serving(HubServer(tmp_path / "served")) as server, pointing(server.address, tmp_path / "cache"):
        arrived: list[int] = []
        checkpoint = Checkpoint.open("org/name", progress=arrived.append)
        assert_same(read_all(checkpoint), STATE)
        assert server.fetched == dict.fromkeys(expected, 1)
        assert arrived
        assert str(checkpoint.manifest.source).startswith(f"hf://org/name@{COMMIT}")
        for source in ("org/name", "hf://org/name", "hf://org/name@v1", f"hf://org/name@{COMMIT}"):
            assert_same(read_all(Checkpoint.open(source)), STATE)
        assert server.fetched == dict.fromkeys(expected, 1), "the cache has them"


def test_plan_builds_the_model_that_the_checkpoint_is_of(model: Path, tmp_path: Path) -> None:
    Qwen3ForCausalLM(SMALL).save_pretrained(model)
    with serving(HubServer(model)) as server, pointing(server.address, tmp_path / "cache"):
        for name in ("org/name", "hf://org/name", "hf://org/name@v1"):
            result = CliRunner().invoke(main, ["plan", name, "--json"])
            assert (result.exit_code, json.loads(result.stdout)["fit"]["error"]) == (0, ""), result.output
    (model / "config.json").write_text('{"architectures": ["Unknown"]}')  # that an open checkpoint has next to it
    with serving(HubServer(model)) as server, pointing(server.address, tmp_path / "other-cache"):
        opened = Checkpoint.open("org/name")
        text = "next to hf://org/name@.* names a model that cannot be built"
        must_raise(ValueError, text, epload.convert, opened, tmp_path / "new", dtype="bfloat16")


def test_a_rule_of_a_model_needs_its_configuration_only(model: Path, tmp_path: Path) -> None:
    section = {"quant_method": "fp8", "weight_block_size": [4, 4]}
    (model / "config.json").write_text(json.dumps({"quantization_config": section}))
    with serving(HubServer(model)) as server:
        for offline in (False, True):
            with pointing(server.address, tmp_path / "cache", offline=offline):
                assert Quantize("hf://org/name@v1").quantization_config == section
        assert server.fetched == {"config.json": 1}
        with pointing(server.address, tmp_path / "cache"):
            must_raise(CheckpointError, "nor, for this user, such a model at", Quantize, "org/other")
            (model / "config.json").unlink()
            must_raise(ValueError, "expected a quantization_config, but 'org/name' has none", Quantize, "org/name")


def test_a_variant_in_the_cache_is_not_loaded_for_another(model: Path, tmp_path: Path) -> None:
    save_file(VARIANT, model / "model.fp16.safetensors")
    with serving(HubServer(model)) as server:
        with pointing(server.address, tmp_path / "cache"):
            assert_same(read_all(Checkpoint.open("org/name", variant="fp16")), VARIANT)
            assert server.fetched == {"config.json": 1, "model.fp16.safetensors": 1}
            text = r"has no weights of variant='ema'; it has consolidated\.safe"
            must_raise(CheckpointError, text, Checkpoint.open, "org/name", variant="ema")
        text = r"weights of a variant only: model\.fp16\.safetensors; pass variant='fp16'"
        _refused(server, tmp_path / "cache", "org/name", text, offline=True)


def test_offline_from_the_cache(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    def check(offline: bool = False) -> None:
        with pointing(server.address, cache, offline=offline):
            assert_same(read_all(Checkpoint.open("hf://org/name")), STATE)

    with serving(HubServer(model)) as server:
        check()
        asked = server.asked
        check(offline=True)
        for revision in ("v2", "0" * 40):
            match = f"in revision {revision}: .*not in the cache.*hf download org/name --revision {revision}$"
            _refused(server, cache, f"hf://org/name@{revision}", match, offline=True)
        assert server.asked == asked
        for status in (500, 429, 408):
            server.broken = status
            check()
    check()  # nobody listens there
    with socket.create_server(("127.0.0.1", 0)) as silent, mock.patch.object(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2):
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"  # which accepts and never answers
        with pointing(address, cache):
            assert_same(read_all(Checkpoint.open("org/name")), STATE)
    (link,) = cache.rglob("model.safetensors")
    assert "." not in link.resolve().name, "the content has the name of its digest"
    assert_same(read_all(Checkpoint.open(link.resolve())), STATE)


def test_offline_with_weights_of_another_name(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").rename(model / "consolidated.safetensors")
    for name in ("pytorch_model.bin", "config.json"):
        (model / name).unlink()
    with serving(HubServer(model)) as server:
        for source in ("org/name", "hf://org/name@v1", f"hf://org/name@{COMMIT}"):
            for offline in (False, True):
                with pointing(server.address, tmp_path / "cache", offline=offline):
                    assert_same(read_all(Checkpoint.open(source)), STATE)
        (link,) = (tmp_path / "cache").rglob("consolidated.safetensors")
        link.rename(link.with_name("tokenizer.json"))
        for source in ("org/name", "hf://org/name@v1", f"hf://org/name@{COMMIT}"):
            _refused(server, tmp_path / "cache", source, "not in the cache .*hf download", offline=True)


def _refused(server: HubServer, cache: Path, source: str, match: str, token: str = "", offline: bool = False) -> None:
    with pointing(server.address, cache, token, offline):
        text = str(must_raise(CheckpointError, match, Checkpoint.open, source))
    assert TOKEN not in text
    assert len(text.splitlines()) == 1


def test_what_the_hub_refuses(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with serving(HubServer(model)) as server:
        _refused(server, cache, "org/other", "neither such a path nor, for this user, such a model at http.*HF_TOKEN")
        _refused(server, cache, "hf://org/name@v2", "org/name has no revision v2 at http")
        _refused(server, cache, "org/name", "cannot be reached .*not in the cache.*hf download org/name", offline=True)
        server.broken = 500
        _refused(server, cache, "org/name", "answered 500 for hf://org/name", TOKEN)
    _refused(server, cache, "org/name", r"cannot be reached \(ConnectError\), and it is not in the cache", TOKEN)
    with serving(HubServer(model, private=True)) as server:
        _refused(server, cache, "org/name", "if it is private, log in with `hf auth login`", TOKEN + "x")
    with serving(HubServer(model, gated=True)) as server:
        _refused(server, cache, "org/name", "access to hf://org/name@.* is restricted: accept its conditions at")
    for source in ("hf://name", "hf://org/name@", "hf://", "hf://a/b/c"):
        _refused(server, cache, source, "expected hf://org/name or hf://org/name@revision, got")
    with serving(HubServer(model, private=True)) as server:
        with pointing(server.address, cache, TOKEN):
            Checkpoint.open("org/name").close()
        # Not answered from the cache: access may have been taken away.
        _refused(server, cache, "hf://org/name", "if it is private")


def test_a_cache_that_cannot_be_written(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    full = mock.patch("huggingface_hub.snapshot_download", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with serving(HubServer(model)) as server:
        text = "cannot download hf://org/name@.* into the cache .*/file: .*: (File exists|Not a directory); make room"
        _refused(server, tmp_path / "file", "org/name", text)
        with full:
            _refused(server, tmp_path / "cache", "org/name", "into the cache .*/cache: No space left on device; make room")


def test_a_local_folder_wins(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    save_file({"mine": torch.ones(2)}, tmp_path / "org" / "name" / "model.safetensors")
    with serving(HubServer(model)) as server, pointing(server.address, tmp_path / "cache"):
        assert_same(read_all(Checkpoint.open("org/name")), {"mine": torch.ones(2)})
        assert_same(read_all(Checkpoint.open("hf://org/name")), STATE)
        assert hub.parse(Path("org/other")) is None, "a Path is a path"
    with mock.patch.dict(sys.modules, {"huggingface_hub": None}):
        text = r"no such path; .*pip install epload\[hub\]"
        must_raise(CheckpointError, text, Checkpoint.open, "org/absent")


def _load(rank: int, address: str, caches: list[Path], readers: str, source: str) -> list[str]:
    torch.manual_seed(0)
    with pointing(address, caches[rank // 2]):
        model: nn.Module = meta_net()
        with HierarchicalLoader(Topology.from_nodes(NODES), readers=readers, verify=True, progress=False) as loader:
            for _ in range(2):
                loader.load(model, source)
    return list(wrong(model, state_for(1)))


@pytest.fixture
def steps(tmp_path: Path) -> dict[str, Path]:
    """Folders of a chain, of which the last is that of ``state_for(1)``."""
    states = [state_for(1) for _ in range(3)]
    for step, state in enumerate(states[:2], 1):
        for value in list(state.values())[: 3 - step]:
            value.view(-1)[0] += step
    folders = {f"step-{step}": tmp_path / f"step-{step}" for step in (1, 2, 3)}
    for state, folder, base in zip(states, folders.values(), (None, *folders.values()), strict=False):
        epload.save(state, folder, base=base)
    epload.save(states[-1], tmp_path / "whole")
    return {**folders, "whole": tmp_path / "whole"}


def _steps_server(steps: dict[str, Path], missing: str = "", delay: float = 0.0) -> HubServer:
    others = {name: folder for name, folder in steps.items() if name != missing}
    return HubServer(steps["step-1"], delay=delay, **others)


def test_a_relative_base_is_the_model_of_that_name(steps: dict[str, Path], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with serving(_steps_server(steps)) as server:
        with pointing(server.address, cache):
            assert_same(read_all(Checkpoint.open("org/step-3")), state_for(1))
        expected = {"model.safetensors": 1, "epload-delta.json": 2, "changes-00001-of-00001.epload": 2}
        assert server.fetched == expected
        asked = server.asked
        with pointing(server.address, cache, offline=True):
            assert_same(read_all(Checkpoint.open(f"hf://org/step-3@{COMMIT}")), state_for(1))
        assert server.asked == asked
    with serving(_steps_server(steps, "step-1")) as server:
        match = r"org--step-2/\S+.json has what has changed since ../step-1, .*no checkpoint at org/step-1: there is neither"
        _refused(server, tmp_path / "empty", "org/step-2", match)
        _refused(server, tmp_path / "empty", "org/step-3", match)


def test_a_base_that_is_no_model(steps: dict[str, Path], tmp_path: Path) -> None:
    index = json.loads((steps["step-2"] / "epload-delta.json").read_text())
    for number, path in enumerate(("base", "..", "../../a/b/c", "../step-2", "../../../a/b")):
        index["base"]["path"] = path
        (steps["step-2"] / "epload-delta.json").write_text(json.dumps(index))
        with serving(_steps_server(steps)) as server:
            text = r"expected the path of another model, such as \.\./NAME, got"
            _refused(server, tmp_path / f"cache-{number}", "org/step-2", text)


def test_another_rank_reads_the_commit_of_the_first(steps: dict[str, Path], tmp_path: Path) -> None:
    with serving(_steps_server(steps)) as server, pointing(server.address, tmp_path / "cache"):
        manifest = Checkpoint.open("org/step-3").manifest
        info = HfApi.model_info
        with mock.patch.object(HfApi, "model_info", autospec=True, side_effect=info) as asked:
            assert_same(read_all(join_source("org/step-3", manifest)), state_for(1))
    named = [(call.args[1], call.kwargs["revision"]) for call in asked.call_args_list]
    assert named == [("org/step-3", COMMIT), ("org/step-2", None), ("org/step-1", None)]


def test_a_base_on_the_hub_is_named_by_its_commit(
    steps: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "local").mkdir()
    monkeypatch.chdir(tmp_path / "local")  # in which the base is no path
    state = state_for(2)
    with serving(_steps_server(steps)) as server:
        with pointing(server.address, tmp_path / "cache"):
            epload.save(state, ".", base="org/step-3")
            assert_same(read_all(Checkpoint.open(tmp_path / "local")), state)
        with pointing(server.address, tmp_path / "cache", offline=True):
            assert_same(read_all(Checkpoint.open(tmp_path / "local")), state)
        match = f"since hf://org/step-3@{COMMIT}, which has to be there, too: .*hf download org/step-3 --revision {COMMIT}"
        _refused(server, tmp_path / "empty", str(tmp_path / "local"), match, offline=True)


@pytest.mark.parametrize(
    ("readers", "name", "times"),
    [("auto", "whole", 2), ("one", "whole", 1), ("every", "step-3", 2), ("partitioned", "step-3", 2), ("one", "step-3", 1)],
)  # fmt: skip
def test_one_rank_of_each_cache_downloads(readers: str, name: str, times: int, steps: dict[str, Path], tmp_path: Path) -> None:
    """2 nodes x 2 ranks, with a cache for each node. Where one rank reads, no other node downloads."""
    caches = [tmp_path / "cache-0", tmp_path / "cache-1"]
    with serving(_steps_server(steps, delay=0.1)) as server:
        all_fine(ranks.run(4, _load, server.address, caches, readers, f"hf://org/{name}"))
    assert server.fetched["model.safetensors"] == times
