"""Runs the steps before data moves: opening, sharing the manifest, planning. Each ends in a round in which all ranks learn of a
failure, so that they go on together or not at all."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

import torch

from epload.checkpoint.manifest import Manifest
from epload.cluster.topology import Topology
from epload.control.watch import Stop
from epload.core.attempt import attempt
from epload.errors import LoadError, ManifestMismatch, ModelMismatch, message_of
from epload.loading.agreed import AgreedLoad, Announcement, Draft, Opening, Proposal
from epload.loading.buffers import find_holders
from epload.loading.differences import (
    MeshClaims,
    check_same_loader,
    check_same_options,
    distinct,
    explain_difference,
    find_mesh_mismatches,
    raise_mesh_mismatch,
)
from epload.loading.hints import check_match
from epload.loading.inputs import InputReader, LocalInputs
from epload.loading.missing import Missing, compute_missing, initialize, unfilled_anywhere
from epload.loading.request import Options, Request
from epload.loading.resources import Resources
from epload.loading.routes import Router
from epload.loading.tied import TiedWeights
from epload.mapping.mapping import Mapping, ignored_keys
from epload.mapping.resolve import resolve_mapping, with_quantization_of
from epload.model.devices import CPU
from epload.model.targets import Targets
from epload.observe.events import Events
from epload.planning.choose import choose_readers
from epload.planning.plan import LoadPlan, make_plan
from epload.planning.schedule import wave_limit
from epload.planning.waves import wave_bytes
from epload.report import LoadReport
from epload.staging.board import Board
from epload.staging.shared_memory import collect_offers
from epload.transport import sharing
from epload.transport.movers import SLOWEST


def record_events(topology: Topology, report: LoadReport) -> None:
    """Starts to record, as events, what this rank does in the load."""
    report.events = Events(topology.rank, topology.nodes.index(topology.node))
    if topology.control.rounds is not None:
        topology.control.rounds.events = report.events


class Agreement:
    """Brings the ranks of one loader to an :class:`AgreedLoad`; keeps plans for the next load."""

    def __init__(self, topology: Topology, options: Options, router: Router, resources: Resources, loader: int) -> None:
        """``loader``: the loader's number among those of its topology."""
        self._topology = topology
        self._control = topology.control
        self._options = options
        self._router = router
        self._resources = resources
        self._loader = loader
        self._meshes = MeshClaims(topology.ranks)
        self._tied = TiedWeights(self._control, options.src)
        self._plans: dict[frozenset[int], tuple[tuple[bytes, Mapping, str], Targets, LoadPlan]] = {}
        self._closed = False
        self._common = ""
        """Identity of a manifest that all ranks have."""
        self.inputs = InputReader(topology, options, router)

    def run(self, request: Request, streams: Sequence[torch.Stream], report: LoadReport) -> AgreedLoad:
        """Collective. ``streams``: of the models' device, those that the caller gave.

        Raises:
            LoadError, ValueError, TypeError: the same on every rank; nothing has been changed.
        """
        inputs, failure = attempt(lambda: self._read_inputs(request, streams))
        if inputs is not None:
            self._resources.prepare_staging(inputs.device)
        proposal = self._propose(request, inputs) if inputs is not None else None
        opening = self._agree_on_opening(request, inputs, proposal, failure)
        assert inputs is not None
        if opening.traced and report.events is None:
            record_events(self._topology, report)
        if opening.planned is not None:
            assert proposal is not None
            return self._accept(request, inputs, proposal, opening)
        if proposal is not None and proposal.joined:
            self.inputs.close_checkpoint()
            inputs.checkpoint = None
        manifest = self._share_manifest(inputs, opening, report)
        return self._agree_on_plan(request, inputs, opening, manifest)

    def _read_inputs(self, request: Request, streams: Sequence[torch.Stream]) -> LocalInputs:
        if self._closed:
            raise ValueError("expected an open HierarchicalLoader, got one that was closed; make a new one")
        return self.inputs.read(request, streams)

    def close(self) -> None:
        """Forgets plans and what was read of models."""
        self._closed = True
        self._plans.clear()
        self.inputs.forget()

    # ---- a load like the one before ----

    def _propose(self, request: Request, inputs: LocalInputs) -> Proposal | None:
        """None unless this is a load of a known checkpoint into a known model, which needs no round but this and the last."""
        known = self.inputs.manifest
        if inputs.checkpoint is not None and self._topology.rank == self._options.src:
            known = inputs.checkpoint.manifest
        fresh = inputs.devices.has_meta or inputs.targets.unsaved_meta
        if not self._plans or known is None or fresh or inputs.local_modules:
            return None
        opened = inputs.checkpoint is not None

        def make() -> tuple[Draft, LoadPlan]:
            draft = self._make_draft(request, inputs, known, same_content=False)
            return draft, self._make_checked_plan(request, inputs, draft, frozenset())

        made, _ = attempt(make)  # what fails here fails again, and is reported, in the rounds of a first load
        joined = not opened and inputs.checkpoint is not None
        if made is None and joined:
            self.inputs.close_checkpoint()
            inputs.checkpoint = None
        return Proposal(*made, joined) if made is not None else None

    def _accept(self, request: Request, inputs: LocalInputs, proposal: Proposal, opening: Opening) -> AgreedLoad:
        draft, plan, _ = proposal
        manifest = draft.manifest
        if self._topology.rank != self._options.src:
            manifest = manifest.with_provenance(opening.manifest.about)
        assert opening.planned is not None
        _, all_read, kept, _ = opening.planned
        draft = replace(draft, manifest=manifest)
        return self._agreed(request, inputs, opening, draft, plan, all_read, kept, offers={}, missing=None)

    # ---- opening ----

    def _agree_on_opening(
        self, request: Request, inputs: LocalInputs | None, proposal: Proposal | None, failure: Exception | None
    ) -> Opening:
        src = self._options.src
        view = self._view_of_opening(request, inputs, proposal)

        def decide(views: dict[int, dict[str, Any]]) -> list[Any]:
            check_same_loader({rank: view["loader"] for rank, view in views.items()})
            check_same_options({rank: view["options"] for rank, view in views.items()})
            announced, content = Announcement(0, "", []), ""
            if len(views) > 1:
                announced, content = Announcement(*views[src]["manifest"]), views[src].get("content", "")
                if all(view.get("known") == announced.identity for rank, view in views.items() if rank != src):
                    announced = announced._replace(nbytes=0)
            uneven = len({view["lost"] for view in views.values()}) > 1
            planned = None
            # Ranks have opened what they found at the path; if the source has other files, they have to open these.
            same_files = len({view["version"] for view in views.values() if "version" in view}) == 1
            if announced.nbytes == 0 and same_files and all("plan" in view for view in views.values()):
                planned = self._compare_plans({rank: view["plan"] for rank, view in views.items()})
                fingerprints, _, _, mismatches = planned
                if len(fingerprints) > 1 or mismatches:
                    planned = None
            meta, groups = any(view["meta"] for view in views.values()), max(view["groups"] for view in views.values())
            content = content if announced.nbytes else ""
            card_each = all(view["cards"] for view in views.values())
            traced = any(view["trace"] for view in views.values())
            return [announced, content, uneven, meta, views[src]["seed"], groups, planned, card_each, traced]

        answer = self._control.settle("opening the checkpoint", failure, view, decide)
        announced, content, uneven, meta, seed, groups, planned, self._router.card_each, traced = answer
        assert inputs is not None
        self._topology.groups.agree(groups)
        # Some ranks have buffers that others lack.
        holders = find_holders(self._control, request.model, inputs.targets) if uneven else {}
        return Opening(Announcement(*announced), content, holders, meta, seed, planned, traced)

    def _view_of_opening(
        self, request: Request, inputs: LocalInputs | None, proposal: Proposal | None
    ) -> dict[str, Any]:
        """This rank's part of that round."""
        src, rank = self._options.src, self._topology.rank
        timeout = self._control.timeout.total_seconds()
        local_modules = request.parts is not None and bool(request.parts.local_modules)
        described = self._describe_options(inputs.device if inputs is not None else CPU)
        view: dict[str, Any] = {
            "loader": self._loader,
            "options": f"{described} timeout={timeout:g} local_modules={local_modules}",
            "lost": inputs is not None and bool(inputs.targets.unsaved_meta),
            "meta": inputs is not None and (inputs.devices.has_meta or bool(inputs.targets.unsaved_meta)),
            "groups": self._topology.groups.count,
            "trace": request.trace,
            "cards": inputs is not None and self._router.has_card_each(inputs.device),
        }
        if rank == src:
            view["seed"] = torch.initial_seed()
        if proposal is not None:
            assert inputs is not None
            view["plan"] = self._describe_plan(inputs, proposal.draft, proposal.plan)
            if inputs.checkpoint is not None or self._router.may_read(inputs.device):
                view["version"] = proposal.draft.manifest.version
        if len(self._topology.ranks) > 1:
            if self.inputs.manifest is not None:
                view["known"] = self.inputs.manifest.identity
            if rank == src and inputs is not None:
                assert inputs.checkpoint is not None
                ours = inputs.checkpoint.manifest
                view["manifest"] = len(ours.compact), ours.identity, ours.provenance
                only_src = ours.locations is None
                if self._common != ours.identity and not self._router.needs_groups(inputs.device, only_src):
                    view["content"] = b64encode(ours.compact).decode()
        return view

    def _describe_options(self, device: torch.device) -> str:
        """Describes the options that ranks must agree on before they can even share the manifest."""
        o = self._options
        return (
            f"readers={o.readers} algorithm={o.algorithm} src={o.src} bucket_bytes={o.bucket_bytes} "
            f"device={device.type} verify={o.verify}"
        )

    # ---- the manifest ----

    def _share_manifest(self, inputs: LocalInputs, opening: Opening, report: LoadReport) -> Manifest:
        """The source's manifest, on every rank."""
        nbytes, _, about = opening.manifest
        ours = inputs.checkpoint.manifest if inputs.checkpoint and self._topology.rank == self._options.src else None
        if nbytes and not opening.content:
            compact = self._send_manifest(inputs, ours.compact if ours is not None else bytes(nbytes), report)
        else:
            compact = b64decode(opening.content)
        if ours is not None:
            return ours
        if nbytes:
            return Manifest.from_compact(compact, about)
        assert self.inputs.manifest is not None
        return self.inputs.manifest.with_provenance(about)

    def _send_manifest(self, inputs: LocalInputs, compact: bytes, report: LoadReport) -> bytes:
        """Over the route of the data. ``compact``: of one length on all ranks."""
        self._control.doing = "sharing the manifest"
        try:
            route = self._router.manifest_route(inputs.device)
            flow = self._router.flow(inputs.device, "one", shared=False)
            if inputs.device == CPU:
                board, limit = Board.alone(), self._control.timeout.total_seconds() + len(compact) / SLOWEST
                with self._control.watch.guards(board):
                    received, steps = sharing.through_host(compact, flow, route, board, limit)
            else:
                stream, stop = self._resources.device.stream(inputs.device), Stop()
                with self._control.watch.guards(stop, self._topology.groups):
                    received, steps = sharing.on_stream(compact, flow, route, stream, stop.check)
        except LoadError:
            raise
        except RuntimeError as error:
            raise LoadError(f"sharing the manifest: {message_of(error)}") from error
        report.transport_steps += steps
        return received

    # ---- the plan ----

    def _agree_on_plan(self, request: Request, inputs: LocalInputs, opening: Opening, known: Manifest) -> AgreedLoad:
        draft, unprepared = attempt(lambda: self._make_draft(request, inputs, known, same_content=True))
        plan, failure = None, None
        if draft is not None:
            wanted = self._wanted_by_any(draft, inputs) if inputs.local_modules else frozenset()
            plan, failure = attempt(lambda: self._make_checked_plan(request, inputs, draft, wanted))
        offer = None
        if plan is not None and draft is not None and self._router.stages_on_host(inputs.device, draft.readers):
            offer = self._resources.begin_sharing(wave_bytes(plan, draft.per_wave))
        missing = None
        if opening.meta and plan is not None and not (inputs.local_modules or plan.missing or plan.mismatched):
            missing, unprepared = attempt(
                lambda: initialize(request, inputs, plan, set(), opening.holders, opening.seed)
            )
        view = [*self._describe_plan(inputs, draft, plan), offer]
        fingerprints, all_read, kept, mismatches, offers = self._control.settle(
            "planning", unprepared, view,
            lambda views: [*self._compare_plans(views), collect_offers({rank: view[-1] for rank, view in views.items()})],
            patience=2,
        )  # fmt: skip
        if "" in fingerprints or len(fingerprints) > 1:
            self._raise_disagreement(inputs, draft, failure)
        if mismatches:
            raise_mesh_mismatch(self._control, inputs.targets, mismatches)
        assert plan is not None
        assert draft is not None
        if inputs.local_modules:
            self._tied.compare_anywhere(inputs.checkpoint, draft.manifest, plan.twins)
        return self._agreed(request, inputs, opening, draft, plan, all_read, kept, offers, missing)

    def _agreed(
        self, request: Request, inputs: LocalInputs, opening: Opening, draft: Draft, plan: LoadPlan, all_read: bool,
        kept: list[int], offers: dict[str, Any], missing: Missing | None,
    ) -> AgreedLoad:  # fmt: skip
        assert self.inputs.manifest is not None
        self._common = self.inputs.manifest.identity
        missing_keys, mismatched_keys = unfilled_anywhere(self._control, inputs, plan)
        if missing is None:
            missing = compute_missing(
                self._control, request, inputs, plan, [*missing_keys, *mismatched_keys], opening.holders, opening.meta,
                opening.seed,
            )  # fmt: skip
        ignored = ignored_keys(draft.mapping, draft.manifest.names, missing_keys, plan.unexpected)
        readers, reason = self._choose_readers(draft.manifest, plan, all_read, kept)
        return AgreedLoad(
            inputs, draft.manifest, plan, draft.per_wave, readers, reason, all_read, kept, missing_keys, mismatched_keys,
            ignored, missing, prepared=opening.planned is not None, offers=offers,
        )  # fmt: skip

    def _choose_readers(self, manifest: Manifest, plan: LoadPlan, all_read: bool, kept: list[int]) -> tuple[str, str]:
        """The readers, and why. Equal on all ranks, which have agreed on what it depends on."""
        if self._options.readers != "auto":
            return self._options.readers, ""
        of_rank = dict(zip(self._topology.ranks, kept, strict=True))
        by_node = [[of_rank[rank] for rank in node] for node in self._topology.nodes]
        return choose_readers(
            plan.slots.payload, by_node, all_read=all_read, objects=manifest.in_object_storage, src=self._options.src
        )

    def _describe_plan(self, inputs: LocalInputs, draft: Draft | None, plan: LoadPlan | None) -> list[Any]:
        """A rank's part of the planning round."""
        fingerprint, kept = "", 0
        if draft is not None and plan is not None:
            fingerprint = plan.fingerprint.hex()
            kept = plan.spanned if draft.manifest.in_object_storage else plan.owned
        return [fingerprint, inputs.checkpoint is not None, kept, self._meshes.of(inputs.targets)]

    def _make_draft(self, request: Request, inputs: LocalInputs, known: Manifest, same_content: bool) -> Draft:
        manifest = self.inputs.join(inputs, request.checkpoint, known, same_content)
        mapping = resolve_mapping(request.mapping, request.model, inputs.targets.index, manifest.names)
        self.inputs.manifest = manifest
        manifest = with_quantization_of(request.model, manifest)
        device, readers = inputs.device, self._router.planned_readers(only_src=manifest.locations is None)
        wave = wave_limit(manifest.nbytes, self._router.wave_bytes(device, readers))
        per_wave = self._router.buckets_per_wave(device, readers, wave)
        bucket_bytes = wave // per_wave if self._router.stages_on_host(device, readers) else wave
        options = (
            f"{self._describe_options(device)} strict={request.strict} "
            f"ignore_mismatched_shapes={request.ignore_mismatched_shapes} prefix={request.prefix!r} "
            f"variant={request.variant!r} mapping={mapping}"
        )
        return Draft(manifest, mapping, readers, per_wave, bucket_bytes, options)

    def _make_checked_plan(
        self, request: Request, inputs: LocalInputs, draft: Draft, wanted: frozenset[int]
    ) -> LoadPlan:
        """Raises ModelMismatch where the plan is not what ``strict`` and ``ignore_mismatched_shapes`` allow."""
        manifest = draft.manifest
        plan = self._make_plan(draft, inputs.targets, wanted)
        check_match(
            manifest, plan, draft.mapping, strict=request.strict,
            ignore_mismatched_shapes=request.ignore_mismatched_shapes,
        )  # fmt: skip
        if inputs.checkpoint is not None and not inputs.local_modules:
            self._tied.compare(inputs.checkpoint, manifest, plan.twins)
        return plan

    def _compare_plans(self, views: dict[int, list[Any]]) -> list[Any]:
        """Compares plans, on the coordinator. A view: a fingerprint, True if the rank reads, its bytes, and its mesh claims."""
        ordered = [views[rank] for rank in self._topology.ranks]
        return [
            distinct({rank: view[0] for rank, view in views.items()}),
            all(view[1] for view in ordered),
            [view[2] for view in ordered],
            find_mesh_mismatches({rank: view[3] for rank, view in views.items()}),
        ]

    def _raise_disagreement(self, inputs: LocalInputs, draft: Draft | None, failure: Exception | None) -> None:
        """Raises on every rank, in rounds: some rank could not plan, or the plans differ."""
        assert draft is not None
        # A file that was replaced between two ranks' opening it is why they differ.
        self._control.settle("planning", attempt(inputs.check_unchanged)[1])
        explain_difference(self._control, draft.manifest, inputs.targets, draft.options)
        try:
            self._control.settle("planning", failure)
        except ModelMismatch as error:
            if isinstance(failure, ModelMismatch):
                error.copy_keys(failure)
            raise
        raise ManifestMismatch("the ranks made different plans of the same checkpoint and model, nothing was moved")

    def _wanted_by_any(self, draft: Draft, inputs: LocalInputs) -> frozenset[int]:
        """Numbers of the checkpoint tensors that some rank has a place for. A rank that cannot plan ends the load here; one that
        could not even make a draft reports that in this same round."""
        plan, failure = attempt(lambda: self._make_plan(draft, inputs.targets, frozenset()))
        left, names = {*plan.unexpected} if plan is not None else set(), draft.manifest.names
        # What has another shape here is sent too, as is what a tie leaves out: harmless, and it may fit elsewhere.
        view = f"{sum(1 << i for i, name in enumerate(names) if name not in left):x}"

        def either(views: dict[int, str]) -> str:
            return f"{reduce(or_, (int(text, 16) for text in views.values())):x}"

        bits = int(self._control.settle("planning", failure, view, either, patience=2), 16)
        return frozenset(i for i in range(len(names)) if bits >> i & 1)

    def _make_plan(self, draft: Draft, targets: Targets, wanted: frozenset[int]) -> LoadPlan:
        """A plan depends on nothing but its inputs, so that those of the last load are kept for a load of the same kind: one,
        and one more if some ranks want tensors that others do not."""
        inputs = (draft.manifest.digest, draft.mapping, f"{draft.bucket_bytes} {draft.options}")
        known = self._plans.get(wanted)
        if known is not None and known[0] == inputs and targets.matches(known[1]):
            plan = known[2]
        else:
            plan = make_plan(draft.manifest, targets, draft.mapping, draft.bucket_bytes, draft.options, wanted)
            self._plans = {key: kept for key, kept in self._plans.items() if wanted and not key}
        # The next targets may share columns with these.
        self._plans[wanted] = inputs, replace(targets, tensors=[]), plan
        return plan
