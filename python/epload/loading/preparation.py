"""What comes before data moves: opening, sharing the manifest, planning. Every step ends in a round where all ranks hear of a
failure, so that they go on together or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.manifest import Manifest
from epload.cluster.topology import Route, Topology
from epload.control.watch import Watch
from epload.core import dtypes
from epload.core.log import logger
from epload.errors import CheckpointError, LoadError, ManifestMismatch, ModelMismatch, OutOfOrder, text_of
from epload.loading.buffers import find_holders
from epload.loading.hints import check_match, unfilled_error
from epload.loading.routes import Options, Ways
from epload.loading.tied import TiedWeightCheck
from epload.mapping.mapping import Mapping, ignored_keys
from epload.mapping.resolve import resolve_mapping
from epload.model import materialize as mat
from epload.model.devices import CPU, Devices, check_backend, devices_of
from epload.model.expert_parallel import Parts
from epload.model.initialization import Initialization, InitMissing, compute, made_off_meta
from epload.model.snapshot import Snapshot
from epload.model.targets import DTypes, Targets, collect
from epload.planning.plan import LoadPlan, Twin, describe, explain_difference, make_plan
from epload.planning.schedule import wave_limit
from epload.report import LoadReport
from epload.staging.node_memory import Board
from epload.transport import sharing
from epload.transport.device_side import DeviceSide
from epload.transport.transfer import SLOWEST

T = TypeVar("T")
_MAX_MESHES, _MAX_RANKS = 4, 16
"""That an error lists."""
_MAX_VIEWS = 4
"""Whole descriptions of models that are compared to tell where they differ."""


@dataclass(frozen=True)
class Request:
    """What is to be loaded into what, as one rank's caller says it. See ``HierarchicalLoader.load``."""

    model: nn.Module
    checkpoint: Any
    mapping: Mapping | str
    strict: bool
    ignore_mismatched_shapes: bool
    dtype: DTypes
    parts: Parts | None
    init_missing: InitMissing | None

    def check(self) -> None:
        """Raises TypeError for what could not even be looked at."""
        if not isinstance(self.model, nn.Module):
            got = (
                f"the class {self.model.__name__}" if isinstance(self.model, type) else f"a {type(self.model).__name__}"
            )
            raise TypeError(f"expected model to be a torch.nn.Module, got {got}")
        for option in ("strict", "ignore_mismatched_shapes"):
            if not isinstance(value := getattr(self, option), bool):
                raise TypeError(f"expected {option} to be a bool, got {value!r}")
        of_names = isinstance(self.dtype, dict) and all(isinstance(name, str) for name in self.dtype)
        given = list(self.dtype.values()) if isinstance(self.dtype, dict) and of_names else [self.dtype]
        if self.dtype is not None and not all(isinstance(dtype, torch.dtype) for dtype in given):
            raise TypeError(
                "expected dtype to be a torch.dtype, such as torch.bfloat16, or a dict from regular expressions to dtypes, "
                f"got {self.dtype!r}"
            )
        if self.init_missing is not None and not callable(self.init_missing):
            raise TypeError(f"expected init_missing to be a function, got {self.init_missing!r}")


class _Announced(NamedTuple):
    """What the source rank says of its manifest before it sends it."""

    nbytes: int
    """Of its compact form; 0 if every rank has it, from the load before."""
    identity: str
    about: list[Any]


@dataclass
class _Opened:
    """One rank's side of one load."""

    targets: Targets
    devices: Devices
    checkpoint: Checkpoint | None
    local_modules: bool
    """Whether ranks may hold different modules."""
    manifest: _Announced = field(default_factory=lambda: _Announced(0, "", []))
    holders: dict[str, int] = field(default_factory=dict)
    seed: int = 0
    """For tensors that are initialized; equal on all ranks."""
    meta: bool = False
    """Whether any rank has tensors on meta."""

    @property
    def device(self) -> torch.device:
        return self.devices.load


@dataclass(frozen=True)
class Prepared:
    """One load, as all ranks have agreed on it. Equal on all but for ``targets``, ``checkpoint`` and the plan's copies."""

    targets: Targets
    devices: Devices
    checkpoint: Checkpoint | None
    """None on a rank that has not opened it."""
    holders: dict[str, int]
    """Buffers that no checkpoint holds and some rank lacks, each with a rank that has it."""
    manifest: Manifest
    plan: LoadPlan
    route: Route
    """Of the manifest, and of buckets that are not striped."""
    per_wave: int
    all_read: bool
    """Whether every rank has opened the checkpoint."""
    owned: list[int]
    """Bytes that each rank copies into its shards, in the order of the ranks."""
    missing: list[str]
    mismatched: list[str]
    """Names of the model, on whichever rank."""
    initialization: Initialization
    unfilled: frozenset[str]
    """Names of this rank's model for a hook to fill: neither the checkpoint nor the model itself does."""
    garbage: frozenset[str]
    """Those of them that had no storage before the load, so that a hook must fill them."""
    ignored: list[str]
    """Missing and unexpected keys that the mapping says to ignore."""

    def check_unchanged(self) -> None:
        """Raises CheckpointError if a file of the checkpoint is not the one, unchanged, that this rank opened."""
        _check_unchanged(self.checkpoint, "; the model may be partly overwritten")

    def reopen(self) -> None:
        """Opens the files again, to read what lies at their paths now. Raises as :meth:`check_unchanged`."""
        if self.checkpoint is not None:
            self.check_unchanged()
            self.checkpoint.reopen()

    @property
    def device(self) -> torch.device:
        """That the load works on."""
        return self.devices.load


class Preparation:
    """Of the loads of one loader; keeps what the next one need not find out again."""

    def __init__(
        self, topology: Topology, options: Options, ways: Ways, device: DeviceSide, watch: Watch, loader: int
    ) -> None:
        """``loader``: the loader's number among those of its topology."""
        self._loader = loader
        self._topology = topology
        self._claims: tuple[object, list[list[Any]]] | None = None
        self._control = topology.control
        self._watch = watch
        self._options = options
        self._ways = ways
        self._device = device
        self.snapshot: Snapshot | None = None
        self.manifest: Manifest | None = None
        """That of the load before."""
        self._tied = TiedWeightCheck()
        self._opened: Checkpoint | None = None
        """What this rank has opened for the present load, unless the caller gave it opened."""
        self._plans: dict[frozenset[int], tuple[tuple[bytes, Mapping, str], Targets, LoadPlan]] = {}

    def run(self, request: Request, stream: torch.Stream | None, report: LoadReport) -> Prepared:
        """Collective. ``stream``: that of the models' device, if the caller gave one.

        Raises:
            LoadError, ValueError, TypeError: the same on every rank; nothing has been changed.
        """
        opened = self._open(request, stream)
        route, manifest = self._connect(opened, report)
        return self._agree_on_plan(request, opened, route, manifest)

    # ---- opening ----

    def _open(self, request: Request, stream: torch.Stream | None) -> _Opened:
        opened, failure = attempt(lambda: self._inspect(request, stream))
        parts = request.parts
        said = self._spelled(opened.device if opened is not None else CPU)
        timeout = self._control.timeout.total_seconds()
        options = f"{said} timeout={timeout:g} local_modules={parts is not None and bool(parts.local_modules)}"
        src = self._options.src
        view: dict[str, Any] = {
            "loader": self._loader,
            "options": options,
            "lost": opened is not None and bool(opened.targets.lost),
            "meta": opened is not None and (opened.devices.meta or bool(opened.targets.lost)),
        }
        if self._topology.rank == src:
            view["seed"] = torch.initial_seed()
        several = len(self._topology.ranks) > 1
        if several and self.manifest is not None:
            view["known"] = self.manifest.identity
        if several and opened is not None and self._topology.rank == src:
            assert opened.checkpoint is not None
            ours = opened.checkpoint.manifest
            view["manifest"] = len(ours.compact), ours.identity, ours.about

        def decide(views: dict[int, dict[str, Any]]) -> list[Any]:
            _same_loader({rank: view["loader"] for rank, view in views.items()})
            _all_equal({rank: view["options"] for rank, view in views.items()})
            announced = None
            if len(views) > 1:
                announced = _Announced(*views[src]["manifest"])
                if all(view.get("known") == announced.identity for rank, view in views.items() if rank != src):
                    announced = announced._replace(nbytes=0)
            uneven = len({view["lost"] for view in views.values()}) > 1
            return [announced, uneven, any(view["meta"] for view in views.values()), views[src]["seed"]]

        announced, uneven, meta, seed = self._control.settle("opening the checkpoint", failure, view, decide)
        assert opened is not None
        opened.meta, opened.seed = meta, seed
        if announced is not None:
            opened.manifest = _Announced(*announced)
        if uneven:  # some ranks have buffers that others lack
            opened.holders.update(find_holders(self._control, request.model, opened.targets))
        return opened

    def _spelled(self, device: torch.device) -> str:
        """What ranks must agree on before they can so much as share the manifest."""
        by_node = " by node" if device != CPU and self._ways.share_buffers(device) else ""
        o = self._options
        return (
            f"readers={o.readers} algorithm={o.algorithm}{by_node} src={o.src} bucket_bytes={o.bucket_bytes} "
            f"device={device.type} verify={o.verify}"
        )

    def _inspect(self, request: Request, stream: torch.Stream | None) -> _Opened:
        request.check()
        asked = (request.dtype, request.parts)
        model, checkpoint = request.model, request.checkpoint
        targets = self.snapshot.read(model, asked) if self.snapshot is not None else None
        if targets is None:
            targets = collect(model, request.dtype, request.parts)
            devices = devices_of(targets, mat.offloaded(model), stream)
            if self._plans:  # one load pays for nothing that only the next one gains from
                self.snapshot = Snapshot(model, targets, devices, asked)
        else:
            assert self.snapshot is not None
            devices = self.snapshot.devices
        check_backend(self._topology.group, devices.load)
        source = None
        options, path = self._options, isinstance(checkpoint, str | os.PathLike)
        joins = self._ways.may_read(devices.load) and not path and options.readers != "auto"
        if self._topology.rank == options.src or joins:
            source = self._keep(Checkpoint.open(checkpoint, self.manifest), checkpoint)
            if source.once and options.proves:
                raise ValueError(
                    f"verify={options.verify!r} reads the checkpoint again after the load, but this one can be read only once: "
                    "leave out consume=True, or pass verify='buckets'"
                )
        return _Opened(targets, devices, source, request.parts is not None and bool(request.parts.local_modules))

    def _keep(self, checkpoint: Checkpoint, given: Any) -> Checkpoint:
        self._opened = checkpoint if checkpoint is not given else None
        return checkpoint

    def close_checkpoint(self) -> None:
        """After a load, however it ended: closes what this rank has opened for it."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    # ---- the manifest ----

    def _connect(self, opened: _Opened, report: LoadReport) -> tuple[Route, Manifest]:
        """The route of the data, and over it the manifest."""
        self._control.doing = "sharing the manifest"
        try:
            route = self._ways.route(opened.device)
            return route, self._share_manifest(opened, route, report)
        except LoadError:
            raise
        except RuntimeError as error:
            raise LoadError(f"sharing the manifest: {text_of(error)}") from error

    def _share_manifest(self, opened: _Opened, route: Route, report: LoadReport) -> Manifest:
        """The source's manifest, on every rank."""
        nbytes, _, about = opened.manifest
        reads = self._topology.rank == self._options.src
        if reads:
            assert opened.checkpoint is not None
            known = opened.checkpoint.manifest
        elif nbytes == 0:
            assert self.manifest is not None
            known = self.manifest.seen_as(about)
        if nbytes == 0:
            return known
        compact, flow = known.compact if reads else bytes(nbytes), self._ways.flow(opened.device, False, "one")
        if opened.device == CPU:
            board, limit = Board.alone(), self._control.timeout.total_seconds() + nbytes / SLOWEST
            with self._watch.guards(board):
                received, steps = sharing.through_host(compact, flow, route, board, limit)
        else:
            received, steps = sharing.on_stream(compact, flow, route, self._device.stream(opened.device))
        report.transport_steps += steps
        return known if reads else Manifest.from_compact(received, about)

    def _join(self, opened: _Opened, checkpoint: Any, manifest: Manifest) -> Manifest:
        """Opens the checkpoint on the other ranks that read, by the source's manifest."""
        auto = self._options.readers == "auto"
        if auto and manifest.places is None:
            return manifest
        if self._ways.may_read(opened.device) and opened.checkpoint is None:
            try:
                opened.checkpoint = self._keep(Checkpoint.join(checkpoint, manifest), checkpoint)
            except (CheckpointError, TypeError):
                if not auto:
                    raise
        return opened.checkpoint.manifest if opened.checkpoint is not None else manifest

    # ---- the plan ----

    def _agree_on_plan(self, request: Request, opened: _Opened, route: Route, known: Manifest) -> Prepared:
        targets = opened.targets

        def prepare() -> tuple[Manifest, Mapping]:
            manifest = self._join(opened, request.checkpoint, known)
            return manifest, resolve_mapping(request.mapping, request.model, targets.index, manifest.names)

        prepared, unprepared = attempt(prepare)
        plan, failure, options = None, None, ""
        per_wave = 0
        if prepared is not None:
            manifest, rules = prepared
            self.manifest = manifest
            wave = wave_limit(manifest.nbytes, self._options.bucket_bytes)
            per_wave = self._ways.per_wave(opened.device, wave)
            lenient = {"strict": request.strict, "ignore_mismatched_shapes": request.ignore_mismatched_shapes}
            agreed = " ".join(f"{name}={value}" for name, value in lenient.items())
            options = f"{self._spelled(opened.device)} {agreed} mapping={rules}"

            def make(wanted: frozenset[int] = frozenset()) -> LoadPlan:
                size = wave // per_wave if self._ways.share_buffers(opened.device) else wave
                return self._plan(manifest, targets, rules, size, options, wanted)

            wanted = self._wanted_by_any(manifest, make) if opened.local_modules else frozenset()

            def check() -> LoadPlan:
                plan = make(wanted)
                check_match(manifest, plan, rules, **lenient)
                if opened.checkpoint is not None and not opened.local_modules:
                    self._compare_tied(opened.checkpoint, manifest, plan.twins)
                return plan

            plan, failure = attempt(check)
        claims = self._mesh_claims(targets)
        view = [
            plan.fingerprint.hex() if plan else "",
            opened.checkpoint is not None,
            plan.owned if plan else 0,
            claims,
        ]

        def decide(views: dict[int, list[Any]]) -> list[Any]:
            ordered = [views[rank] for rank in self._topology.ranks]
            return [
                _distinct({rank: v[0] for rank, v in views.items()}),
                all(v[1] for v in ordered),
                [v[2] for v in ordered],
                _odd_meshes({rank: v[3] for rank, v in views.items()}),
            ]

        fingerprints, all_read, owned, odd = self._control.settle("planning", unprepared, view, decide, patience=2)
        if "" in fingerprints or len(fingerprints) > 1:
            # A file that was replaced between two ranks' opening it is why they differ.
            self._control.settle("planning", attempt(lambda: _check_unchanged(opened.checkpoint))[1])
            self._disagree(describe(manifest, targets, self._options.bucket_bytes, options))
            try:
                self._control.settle("planning", failure)
            except ModelMismatch as error:
                if isinstance(failure, ModelMismatch):
                    error.adopt(failure)
                raise
            raise ManifestMismatch("the ranks made different plans of the same checkpoint and model, nothing was moved")
        if odd:
            self._tell_of_meshes(targets, odd)
        assert plan is not None
        if opened.local_modules:
            self._compare_tied_anywhere(opened, manifest, plan)
        missing, mismatched = self._unfilled_anywhere(opened, plan)
        initialization, unfilled, garbage = self._initialize(request, opened, plan, [*missing, *mismatched])
        return Prepared(
            targets, opened.devices, opened.checkpoint, opened.holders, manifest, plan, route, per_wave,
            all_read, owned, missing, mismatched, initialization, unfilled, garbage,
            ignored_keys(rules, manifest.names, missing, plan.unexpected),
        )  # fmt: skip

    def _initialize(
        self, request: Request, opened: _Opened, plan: LoadPlan, anywhere: list[str]
    ) -> tuple[Initialization, frozenset[str], frozenset[str]]:
        """What the model computes of what the checkpoint does not fill, what it leaves to a hook, and which of that is garbage
        until then.

        Tensors that hold values keep them, unless another rank has them on meta: then all ranks initialize them alike. So do
        those that a model on meta holds only because its class cannot make them on meta.

        Args:
            anywhere: names of tensors that no checkpoint tensor fills on some rank, as all ranks know them.
        """
        targets = opened.targets
        left = {*plan.missing, *plan.mismatched}
        if not opened.meta:
            return Initialization(), frozenset(left), frozenset()
        shared = {targets.names[i]: name for name, i in reversed(targets.index.items())}
        on_meta = {shared[name] for name in left if targets.tensors[targets.index[shared[name]]].is_meta}
        if opened.devices.meta:
            held = [name for name in left if shared[name] not in on_meta]
            on_meta |= {shared[name] for name in made_off_meta(request.model, held)}
        if anywhere:
            on_meta = set(self._control.settle("comparing what is missing", None, sorted(on_meta), _union))
        garbage: dict[str, Tensor] = {n: t for n, t in targets.lost.items() if n not in opened.holders}
        garbage |= {n: targets.tensors[targets.index[shared[n]]] for n in left if shared[n] in on_meta}
        dtypes = {name: tensor.dtype for name, tensor in garbage.items()}
        dtypes |= {name: targets.dtypes[targets.index[shared[name]]] for name in left}
        hooked = request.init_missing is not None

        def initialize() -> Initialization:
            made = compute(request.model, garbage, dtypes, opened.seed, request.parts, adapters=not hooked)
            copies = {name for module in targets.staged for name in module.names}
            nobody = sorted(name for name in garbage if name not in made.values and (not hooked or name in copies))
            if nobody:
                raise unfilled_error(nobody)
            return made

        made, failure = attempt(initialize)
        self._control.settle("initializing what the checkpoint lacks", failure)
        assert made is not None
        return made, frozenset({*garbage, *left} - {*made.values}), frozenset({*garbage} - {*made.values})

    def _compare_tied(self, checkpoint: Checkpoint, manifest: Manifest, twins: Sequence[Twin]) -> None:
        """On the rank that every checkpoint has: the others would read the same. Raises ModelMismatch if a pair differs."""
        if self._topology.rank != self._options.src or not twins:
            return

        def progress(nbytes: int) -> None:
            self._control.progress += nbytes

        self._control.doing = "comparing tied weights"
        self._tied.check(checkpoint, manifest, twins, progress)

    def _compare_tied_anywhere(self, opened: _Opened, manifest: Manifest, plan: LoadPlan) -> None:
        """The same where ranks hold different modules, so that the source rank need not have the tie itself."""
        mine = [[*twin[:2], dtypes.name(twin.dtype), *twin.names] for twin in plan.twins]

        def all_of(views: dict[int, list[list[Any]]]) -> list[list[Any]]:
            return list({tuple(twin[:3]): twin for view in views.values() for twin in view}.values())

        found: list[list[Any]] = self._control.settle("comparing tied weights", None, mine, all_of)
        if not found:
            return
        twins = [Twin(a, b, dtypes.from_name(kind), (x, y)) for a, b, kind, x, y in found]

        def compare() -> None:
            if opened.checkpoint is not None:
                self._compare_tied(opened.checkpoint, manifest, twins)

        _, failure = attempt(compare)
        self._control.settle("comparing tied weights", failure, patience=2)

    def _mesh_claims(self, targets: Targets) -> list[list[Any]]:
        """Of each mesh its digest, and how many ranks of the topology have to report the same. Its size does not depend on the
        number of ranks."""
        claims = targets.mesh_claims()
        if self._claims is None or self._claims[0] is not claims:
            ours = frozenset(self._topology.ranks)
            self._claims = claims, [[digest, sum(rank in ours for rank in mesh.ranks)] for digest, mesh in claims]
        return self._claims[1]

    def _tell_of_meshes(self, targets: Targets, odd: dict[str, list[int]]) -> None:
        """Raises ManifestMismatch on every rank. ``odd``: digests of meshes, each with some ranks that have it."""
        said: dict[str, str] = {}
        for digest, mesh in targets.mesh_claims():
            if self._topology.rank == odd.get(digest, [None])[0]:
                number = targets.meshes.index(mesh)
                name = next(
                    name
                    for i, (name, layout) in enumerate(zip(targets.names, targets.layout, strict=True))
                    if i not in targets.own and number in targets.meshes_of[layout]
                )
                said[digest] = f"{mesh}, e.g. for {name}"

        def explain(views: dict[int, dict[str, str]]) -> None:
            known = {digest: text for view in views.values() for digest, text in view.items()}
            lines = [f"ranks {ranks} have mesh {known[digest]}" for digest, ranks in odd.items()]
            raise ManifestMismatch(
                "the ranks disagree about the device mesh, or about what lies on it, nothing was moved:\n  "
                + "\n  ".join(lines)
                + "\nBuild every DeviceMesh from the same ranks in the same order on all ranks"
            )

        self._control.settle("planning", None, said, explain)

    def _wanted_by_any(self, manifest: Manifest, make: Callable[[], LoadPlan]) -> frozenset[int]:
        """Checkpoint tensors that some rank has a place for, by number. A rank that cannot plan ends the load here; one that
        could not even prepare has its say in this same round."""
        plan, failure = attempt(make)
        left = {*plan.unexpected} if plan is not None else set()
        # What has another shape here is sent too, as is what a tie leaves out: harmless, and it may fit elsewhere.
        view = f"{sum(1 << i for i, name in enumerate(manifest.names) if name not in left):x}"

        def either(views: dict[int, str]) -> str:
            return f"{reduce(or_, (int(text, 16) for text in views.values())):x}"

        bits = int(self._control.settle("planning", failure, view, either, patience=2), 16)
        return frozenset(i for i in range(len(manifest.names)) if bits >> i & 1)

    def _unfilled_anywhere(self, opened: _Opened, plan: LoadPlan) -> list[list[str]]:
        """Missing and mismatched names of the model, on whichever rank."""
        kinds = [list(plan.missing), list(plan.mismatched)]
        if not opened.local_modules:
            return kinds
        known = {opened.targets.names[i]: name for name, i in reversed(opened.targets.index.items())}

        def all_of(views: dict[int, list[list[str]]]) -> list[list[str]]:
            return [list(dict.fromkeys(name for view in views.values() for name in view[kind])) for kind in (0, 1)]

        mine = [[known[name] for name in names] for names in kinds]
        unfilled: list[list[str]] = self._control.settle("the report", None, mine, all_of)
        return unfilled

    def _disagree(self, view: list[str]) -> None:
        """Raises ManifestMismatch on every rank if what the ranks want to load into what differs."""
        digest = hashlib.blake2b("\n".join(view).encode(errors="backslashreplace"), digest_size=16).hexdigest()
        speakers = sorted(self._control.settle("planning", None, digest, _distinct).values())[:_MAX_VIEWS]
        if len(speakers) == 1:
            return

        def differ(views: dict[int, list[str] | None]) -> None:
            raise explain_difference({r: v for r, v in sorted(views.items()) if v is not None}, min(speakers))

        self._control.settle("planning", None, view if self._topology.rank in speakers else None, differ)

    def _plan(
        self,
        manifest: Manifest,
        targets: Targets,
        mapping: Mapping,
        bucket_bytes: int,
        options: str,
        wanted: frozenset[int],
    ) -> LoadPlan:
        """A plan depends on nothing but its inputs, so that those of the last load are kept for a load of the same kind: one,
        and one more if some ranks want tensors that others do not."""
        inputs = (manifest.digest, mapping, f"{bucket_bytes} {options}")
        known = self._plans.get(wanted)
        if known is not None and known[0] == inputs and targets.same_as(known[1]):
            plan = known[2]
        else:
            plan = make_plan(manifest, targets, mapping, bucket_bytes, options, wanted)
            self._plans = {key: kept for key, kept in self._plans.items() if wanted and not key}
        self._plans[wanted] = (
            inputs,
            replace(targets, tensors=[]),
            plan,
        )  # the next targets may share columns with these
        return plan


def _check_unchanged(checkpoint: Checkpoint | None, consequence: str = "") -> None:
    if checkpoint is not None and (changed := checkpoint.changed()):
        raise CheckpointError(f"{changed} while it was loaded{consequence}; load again")


def attempt(step: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """What a step gives, or how it failed, for the round that ends it."""
    try:
        return step(), None
    except Exception as error:
        return None, error


def _union(views: dict[int, list[str]]) -> list[str]:
    return sorted({name for names in views.values() for name in names})


def _distinct(views: dict[int, str]) -> dict[str, int]:
    """Each distinct view with the first rank that has it."""
    return {view: rank for rank, view in reversed(views.items())}


def _odd_meshes(claims: dict[int, list[list[Any]]]) -> dict[str, list[int]]:
    """Digests of meshes that not all of their ranks have reported, each with the first ranks that have; a few of them."""
    reported: dict[str, list[int]] = {}
    expected: dict[str, int] = {}
    for rank, theirs in claims.items():
        for digest, count in theirs:
            reported.setdefault(digest, []).append(rank)
            expected[digest] = count
    odd = [digest for digest, ranks in reported.items() if len(ranks) != expected[digest]]
    return {digest: reported[digest][:_MAX_RANKS] for digest in odd[:_MAX_MESHES]}


def _same_loader(numbers: dict[int, int]) -> None:
    if len(set(numbers.values())) > 1:
        logger.info("ranks in loads of different loaders: %s", numbers)
        raise OutOfOrder


def _all_equal(options: dict[int, str]) -> None:
    by_text: dict[str, list[int]] = {}
    for rank, text in options.items():
        by_text.setdefault(text, []).append(rank)
    if len(by_text) > 1:
        said = "; ".join(f"ranks {ranks} have {text}" for text, ranks in by_text.items())
        raise ManifestMismatch(f"the ranks' loaders have different options, nothing was moved: {said}")
