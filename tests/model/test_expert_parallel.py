"""Expert parallelism in the forms in use, where the model itself does not say what its experts are a part of."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import epload
from epload import LocalModules, Mapping, OuterShard
from epload.mapping import Concatenate, Convert, Rename, Stack
from support import jobs
from support.checkpoints import assert_same
from support.checks import as_bytes, full_values, local_of
from support.findings import must_be_refused
from support.models import mesh, on_meta
from support.on_ranks import on_ranks
from support.shards import torch_chunk
from support.small_syncs import receiving, sending, take

EXPERTS, WIDTH, HIDDEN = 12, 6, 4
SOURCES = r"experts\.(?P<index>\d+)\.gate$", r"experts\.(?P<index>\d+)\.up$"
FUSED = Mapping(converts=(Convert(SOURCES, ("experts.gate_up",), (Stack(0), Concatenate(1))),))


def checkpoint() -> dict[str, Tensor]:
    """Experts one by one, every element of its own value."""
    made = {
        f"experts.{i}.{part}": (i * 2 + n) * 1000.0 + torch.arange(WIDTH * HIDDEN).reshape(WIDTH, HIDDEN)
        for i in range(EXPERTS)
        for n, part in enumerate(("gate", "up"))
    }
    return made | {"norm": torch.arange(7.0)}


def fused() -> Tensor:
    file = checkpoint()
    return torch.stack([torch.cat([file[f"experts.{i}.gate"], file[f"experts.{i}.up"]]) for i in range(EXPERTS)])


class Fused(nn.Module):
    """This rank's experts in one plain parameter, which looks like a whole one."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.gate_up = nn.Parameter(torch.empty(experts, 2 * WIDTH, HIDDEN))
        self.norm = nn.Parameter(torch.empty(7))


def store(folder: Path) -> None:
    save_file(checkpoint(), folder / "model.safetensors")
    save_file({"experts.gate_up": fused(), "norm": checkpoint()["norm"]}, folder / "fused.safetensors")


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(WIDTH, HIDDEN))
        self.up = nn.Parameter(torch.empty(WIDTH, HIDDEN))


class Listed(nn.Module):
    """A module for each of this rank's experts, and None or nothing in place of the others."""

    def __init__(self, local_experts: range, numbering: str) -> None:
        super().__init__()
        modules: dict[str, nn.Module] = {
            str(i if numbering == "global" else i - local_experts.start): Expert() for i in local_experts
        }
        self.experts = nn.ModuleDict(modules)
        self.norm = nn.Parameter(torch.empty(7))


def loader(world: int) -> epload.HierarchicalLoader:
    nodes = [list(range(world // 2)), list(range(world // 2, world))]
    return epload.HierarchicalLoader(epload.Topology.from_nodes(nodes), bucket_bytes=700, progress=False, timeout=60)


def check(name: str, got: Tensor, expected: Tensor) -> None:
    """The bits of a tensor of this rank."""
    got = local_of(got)
    assert not got.is_meta, name
    assert got.shape == expected.shape, name
    assert torch.equal(as_bytes(got), as_bytes(expected)), f"{name}: {got.flatten()[:8]}, not {expected.flatten()[:8]}"


def all_fit(report: epload.LoadReport) -> bool:
    return report.missing_keys == report.unexpected_keys == []


@on_ranks(4, store)
def test_transformers_45662_ep_ranks_get_their_own_experts(rank: int, tmp_path: Path) -> None:
    """Plain tensors of this rank's experts: loaders that broadcast rank 0's tensors give all ranks experts 0 to 2."""
    shards = [OuterShard(r"experts\.", mesh(("ep", 4)), dim=0)]
    for source, mapping in ((tmp_path / "model.safetensors", FUSED), (tmp_path / "fused.safetensors", "auto")):
        model = on_meta(lambda: Fused(3))
        report = loader(4).load(model, source, mapping=mapping, outer_shards=shards)
        check(source.name, model.experts.gate_up, fused()[rank * 3 : rank * 3 + 3])
        check("norm", model.norm, checkpoint()["norm"])
        assert all_fit(report), str(report)


@on_ranks(6, store)
def test_fsdp_over_tensors_that_are_one_ranks_experts(rank: int, tmp_path: Path) -> None:
    """FSDP over tensors whose shape is already E / ep, along either dim; ep 3 x fsdp 2 and ep 2 x fsdp 3."""
    for fsdp, ep in ((2, 3), (3, 2)):
        on = mesh(("fsdp", fsdp), ("ep", ep))
        shards, (at_fsdp, at_ep) = [OuterShard("gate_up", on["ep"])], divmod(rank, ep)
        for dim in (0, 1):
            model = on_meta(partial(Fused, EXPERTS // ep))
            fully_shard(model.experts, mesh=on["fsdp"], shard_placement_fn=lambda parameter, dim=dim: Shard(dim))
            fully_shard(model, mesh=mesh(("all", 6)))
            loader(6).load(model, tmp_path / "model.safetensors", mapping=FUSED, outer_shards=shards)
            expected = fused().chunk(ep)[at_ep].chunk(fsdp, dim)[at_fsdp]
            check(f"ep {ep} x fsdp {fsdp} on dim {dim}", model.experts.gate_up, expected.contiguous())
            check("norm", model.norm, torch_chunk(checkpoint()["norm"], 6, 0)[rank])


def planned(model: Any, ep: Any) -> Any:
    """VeOmni's parallel plan says of a model what the caller of a load says of others."""
    model._fqn2spec_info = {"experts.gate_up": SimpleNamespace(placement=Shard(0), para_mesh=ep)}
    return model


def save_and_send(rank: int, meeting: jobs.Meeting, folder: Path, plans: bool) -> None:
    on = mesh(("fsdp", 2), ("ep", 2))
    model = on_meta(partial(Fused, EXPERTS // 2))
    fully_shard(model.experts, mesh=on["fsdp"], shard_placement_fn=lambda parameter: Shard(1))
    runs, options = loader(4), {} if plans else {"outer_shards": [OuterShard("gate_up", on["ep"])]}
    runs.load(planned(model, on["ep"]) if plans else model, folder / "fused.safetensors", **options)
    wrapped: Any = torch.compile(model)
    epload.save(wrapped, folder / "saved", topology=runs.topology)
    epload.save(nn.ModuleDict({"text": model}), folder / "outer", topology=runs.topology)
    model.cpu()  # gives DTensors other objects
    epload.save(model.experts, folder / "inner", topology=runs.topology)
    epload.save(model.state_dict(), folder / "state", topology=runs.topology)
    with sending(meeting, wrapped) as sender:
        sender.send_weights(1)


def receive(rank: int, meeting: jobs.Meeting, folder: Path) -> None:
    model = Fused(EXPERTS)
    with receiving(meeting, model) as receiver:
        take(receiver)
    expected = load_file(folder / "fused.safetensors")
    assert_same(model.state_dict(), expected)
    assert_same(load_file(folder / "saved/model.safetensors"), expected)
    assert_same(load_file(folder / "state/model.safetensors"), expected)
    assert_same(load_file(folder / "inner/model.safetensors"), {"gate_up": expected["experts.gate_up"]})
    outer = load_file(folder / "outer/model.safetensors")
    assert_same({name.removeprefix("text."): tensor for name, tensor in outer.items()}, expected)


@pytest.mark.parametrize("plans", [False, True])
def test_what_was_loaded_as_a_shard_is_saved_and_sent_as_one(tmp_path: Path, plans: bool) -> None:
    store(tmp_path)
    jobs.run([jobs.Job(4, save_and_send, (tmp_path, plans)), jobs.Job(1, receive, (tmp_path,))])


@on_ranks(2, store)
def test_modules_that_each_rank_numbers_from_0_are_not_saved_as_replicas(rank: int, tmp_path: Path) -> None:
    model = Listed(range(rank * 6, rank * 6 + 6), "local")
    local = [LocalModules(r"experts\.(\d+)\.", first=rank * 6)]
    loader(2).load(model, tmp_path / "model.safetensors", local_modules=local)
    text = r"was loaded with LocalModules(first=...)"
    must_be_refused(lambda: epload.save(model, tmp_path / "saved", topology=loader(2).topology), "ModelMismatch", text)
    whole = Listed(range(12), "global")
    epload.load(whole, tmp_path / "model.safetensors", topology=loader(2).topology, progress=False)
    epload.save(whole, tmp_path / "saved", topology=loader(2).topology)


@on_ranks(2, store)
def test_a_model_that_is_sharded_after_the_load_has_the_same_outer_shards(rank: int, tmp_path: Path) -> None:
    model, on = Fused(EXPERTS // 2), mesh(("fsdp", 1), ("ep", 2))
    loader(2).load(model, tmp_path / "fused.safetensors", outer_shards=[OuterShard("experts", on["ep"])])
    fully_shard(model.experts, mesh=on["fsdp"])
    expected, state = load_file(tmp_path / "fused.safetensors"), model.state_dict()
    epload.save(model, tmp_path / "saved", topology=loader(2).topology)
    assert_same(load_file(tmp_path / "saved/model.safetensors"), expected)
    model.experts.tp_size = 2  # its other tensors are whole
    model.experts.bias = nn.Parameter(torch.ones(3))
    epload.save(model, tmp_path / "layer", topology=loader(2).topology)
    assert load_file(tmp_path / "layer/model.safetensors")["experts.bias"].tolist() == [1, 1, 1]
    del model.experts.bias
    model.experts.unshard()  # as a forward pass does
    epload.save(state, tmp_path / "state", topology=loader(2).topology)
    assert_same(load_file(tmp_path / "state/model.safetensors"), expected)


@on_ranks(2, store)
def test_the_plan_of_a_model_that_epload_has_not_loaded_holds_for_its_state_and_in_a_larger_model(
    rank: int, tmp_path: Path
) -> None:
    on = mesh(("fsdp", 1), ("ep", 2))
    model, expected = Fused(EXPERTS // 2), load_file(tmp_path / "fused.safetensors")
    half = slice(rank * EXPERTS // 2, (rank + 1) * EXPERTS // 2)
    model.load_state_dict({name: values[half] if "experts" in name else values for name, values in expected.items()})
    fully_shard(planned(model, on["ep"]), mesh=on["fsdp"])
    for name, whole in {"state": model.state_dict(), "outer": nn.ModuleList([model])}.items():
        model.unshard()  # as a forward pass does
        epload.save(whole, tmp_path / name, topology=loader(2).topology)
        saved = load_file(tmp_path / name / "model.safetensors")
        assert_same({key.removeprefix("0."): tensor for key, tensor in saved.items()}, expected)


@on_ranks(2, store)
def test_copies_of_loaded_parts_are_not_saved_as_replicas(rank: int, tmp_path: Path) -> None:
    model, on = Fused(EXPERTS // 2), mesh(("ep", 2))
    loader(2).load(model, tmp_path / "fused.safetensors", outer_shards=[OuterShard("experts", on)])
    patched = nn.ModuleDict(dict(model.named_children()))
    patched.experts = nn.ParameterDict({"gate_up": nn.Parameter(model.experts.gate_up.detach().clone())})
    copies: dict[str, Any] = {
        "copied": copy.deepcopy(model), "averaged": torch.optim.swa_utils.AveragedModel(model), "replaced": patched,
        "on the host": {name: tensor.clone() for name, tensor in model.state_dict().items()},
    }  # fmt: skip
    text = "seems to be a copy of a tensor that was loaded as an outer shard (experts.gate_up)"
    for name, copied in copies.items():
        save = partial(epload.save, copied, tmp_path / name, topology=loader(2).topology)
        must_be_refused(save, "ModelMismatch", text)
    epload.save(model, tmp_path / "saved", topology=loader(2).topology)


@on_ranks(2, store)
def test_what_takes_the_place_of_a_shard_is_no_shard(rank: int, tmp_path: Path) -> None:
    """Experts that were gathered after the load, and a load that was refused."""
    model, on = Fused(EXPERTS // 2), mesh(("ep", 2))
    refused = {"outer_shards": [OuterShard("experts", on, dim=1)]}
    must_be_refused(lambda: loader(2).load(model, tmp_path / "fused.safetensors", **refused), "ModelMismatch", "experts.gate_up")
    loader(2).load(model, tmp_path / "fused.safetensors", outer_shards=[OuterShard("experts", on)])
    model.experts.gate_up = nn.Parameter(fused())
    epload.save(model, tmp_path / "saved", topology=loader(2).topology)
    assert_same(load_file(tmp_path / "saved/model.safetensors"), load_file(tmp_path / "fused.safetensors"))


HELD = (range(5), range(5, 6), range(6, 12), range(12, 12))
"""Which experts each of four ranks has: uneven, and none at all."""


@on_ranks(4, store)
def test_module_lists_that_hold_one_ranks_experts(rank: int, tmp_path: Path) -> None:
    local_experts, file = HELD[rank], checkpoint()
    runs = loader(4)
    for numbering in ("global", "local"):
        first = 0 if numbering == "global" else local_experts.start
        local = [LocalModules(r"experts\.(\d+)\.", first=first)]
        for where in ("meta", "loaded"):
            model = on_meta(lambda numbering=numbering: Listed(local_experts, numbering))
            fully_shard(model, mesh=mesh(("all", 4)), ignored_params=set(model.experts.parameters()))
            report = runs.load(model, tmp_path / "model.safetensors", local_modules=local)
            for i in local_experts:
                expert = model.experts[str(i - first)]
                check(f"{numbering} {where} gate {i}", expert.gate, file[f"experts.{i}.gate"])
                check(f"{numbering} {where} up {i}", expert.up, file[f"experts.{i}.up"])
            assert all_fit(report), str(report)
            assert report.tensors == 2 * EXPERTS + 1, str(report)
    # A name that no rank has a place for is unexpected on every rank; one that the file lacks is missing on every rank.
    odd = {name: t for name, t in file.items() if name != "experts.7.up"} | {"experts.99.up": file["norm"]}
    model, source = Listed(local_experts, "global"), odd if rank == 0 else None
    options: Any = {"local_modules": [LocalModules(r"experts\.\d+\.")]}
    must_be_refused(lambda: runs.load(model, source, **options), "ModelMismatch", "experts.7.up", "experts.99.up")
    report = runs.load(model, source, strict=False, **options)
    assert (report.missing_keys, report.unexpected_keys) == (["experts.7.up"], ["experts.99.up"]), str(report)
    # Only some ranks say so.
    model, path = on_meta(lambda: Listed(local_experts, "global")), tmp_path / "model.safetensors"
    must_be_refused(lambda: runs.load(model, path, local_modules=local[:rank]), "ManifestMismatch", "local_modules")


class SharedEmbedding(nn.Module):
    """The last stage of a pipeline: its only layer is the 62nd, which has the embedding, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.layers = nn.ModuleList([nn.Module()])
        self.layers[0].embed = self.embed


def test_a_tied_tensor_of_local_modules_has_its_global_name() -> None:
    values, other = torch.arange(8.0).reshape(4, 2), torch.ones(4, 2)
    model = SharedEmbedding()
    options = epload.LoadOptions(local_modules=[LocalModules(r"layers\.(\d+)\.", first=61)])
    epload.load(model, {"embed.weight": values, "layers.61.embed.weight": values}, options=options, progress=False)
    assert torch.equal(model.embed.weight, values)
    source = {"layers.0.embed.weight": other, "layers.61.embed.weight": values}
    report = epload.load(model, source, options=options, strict=False, progress=False)
    assert report.unexpected_keys == ["layers.0.embed.weight"]
    assert torch.equal(model.embed.weight, values)


@on_ranks(4, store)
def test_mistakes_about_experts_are_named(rank: int, tmp_path: Path) -> None:
    two, one, path = mesh(("fsdp", 2), ("ep", 2)), mesh(("ep", 4)), tmp_path / "model.safetensors"

    def refused(kind: str, text: str, *shards: OuterShard, **options: Any) -> None:
        model = on_meta(lambda: Fused(3))
        options = {"mapping": FUSED, "outer_shards": shards, **options}
        must_be_refused(partial(loader(4).load, model, path, **options), kind, text)
        assert model.norm.is_meta, text

    refused("ValueError", "'expertz', dim=0) matches no tensor", OuterShard("expertz", one))
    refused("ValueError", "slice one axis of a larger mesh, e.g. mesh['ep']", OuterShard("gate_up", two))
    refused("ValueError", "experts.gate_up, which has shape [3", OuterShard("gate_up", one, dim=3))
    refused("ModelMismatch", "result has shape [12")
    refused("ModelMismatch", "shape [12", OuterShard("gate_up", mesh(("rep", 2), ("ep", 2))["ep"]))
    nowhere = Mapping((Rename("^nowhere[.]", ""),))
    refused("ModelMismatch", "no rule of the mapping", mapping=nowhere, strict=False)


# ---- pipeline stages ----


class Stages(nn.Module):
    def __init__(self, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(3, 5) for i in layers})
        if 0 in layers:
            self.embed = nn.Embedding(7, 3)


def save_stages(folder: Path) -> None:
    save_file(full_values(on_meta(lambda: Stages(range(5)))), folder / "all.safetensors")


@on_ranks(4, save_stages)
def test_pipeline_stages(rank: int, tmp_path: Path) -> None:
    """Two stages of two ranks each; FSDP inside a stage."""
    stages = [range(3), range(3, 5)]
    on = mesh(("pp", 2), ("fsdp", 2))["fsdp"]
    whole = full_values(on_meta(lambda: Stages(range(5))))
    whole |= {name: tensor.double() for name, tensor in whole.items() if name.startswith(("layers.3", "layers.4"))}
    for readers in ("one", "every"):
        parts = [stages[rank // 2]] if readers == "one" else [stages[rank // 2][:1], stages[rank // 2][1:]]
        model: Any = nn.ModuleList(fully_shard(on_meta(partial(Stages, part)), mesh=on) for part in parts)
        nodes = epload.Topology.from_nodes([[0, 1], [2, 3]])
        stage = epload.HierarchicalLoader(nodes, readers=readers, bucket_bytes=700, progress=False)
        options = {"local_modules": [LocalModules("")], "dtype": {r"layers\.[34]": torch.float64}}  # of one stage
        # As only the last one declares, and the first one renames what it lacks.
        renames = (Rename(r"^layers\.3", "last"),) * (1 - rank // 2)
        options["mapping"] = Mapping(
            ties=(("embed.weight", "head.weight"),) * (rank // 2), renames=renames, aliases={r"^\d+\.": ""}
        )
        report = stage.load(model, tmp_path / "all.safetensors", **options)
        for name, tensor in model.state_dict().items():
            shard = whole[name.partition(".")[2]].chunk(2)[rank % 2]
            assert torch.equal(as_bytes(local_of(tensor)), as_bytes(shard)), f"{readers}: {name} differs"
        assert all_fit(report), str(report)
