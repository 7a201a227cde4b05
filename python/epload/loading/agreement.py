"""Runs the rounds before data moves: opening and planning. In each, all ranks learn of a failure, so that they go on together or
not at all."""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

import torch

from epload.checkpoint.manifest import Manifest
from epload.core.attempt import Attempt
from epload.errors import ManifestMismatch, ModelMismatch
from epload.loading.agreed import AgreedLoad, Draft, Opening
from epload.loading.buffers import find_holders
from epload.loading.differences import (
    check_same_loader,
    check_same_options,
    explain_difference,
    find_mesh_mismatches,
    raise_mesh_mismatch,
)
from epload.loading.hints import check_match
from epload.loading.inputs import InputReader, LocalInputs
from epload.loading.missing import check_held, compute_missing, has_unfinished, unfilled_anywhere
from epload.loading.request import Request
from epload.loading.resources import Resources
from epload.loading.tied import compare_tied, warn_of_broken_ties
from epload.mapping.mapping import find_unused, ignored_keys
from epload.mapping.resolve import resolve_mapping, with_quantization_of
from epload.model.targets import Targets
from epload.observe.trace import Events
from epload.planning.choose import choose_readers
from epload.planning.plan import LoadPlan, make_plan
from epload.report import LoadReport


class Agreement:
    """Brings the ranks of one loader to an :class:`AgreedLoad`; keeps the last plan for the next load."""

    def __init__(self, resources: Resources, loader: int) -> None:
        """``loader``: the loader's number among those of its topology."""
        self._topology = resources.topology
        self._control = resources.topology.control
        self._options = resources.options
        self._router = resources.router
        self._loader = loader
        self._plan: tuple[tuple[object, ...], Targets, LoadPlan] | None = None
        self.inputs = InputReader(resources)

    def run(self, request: Request, report: LoadReport) -> AgreedLoad:
        """Runs the rounds. Collective.

        Raises:
            LoadError, ValueError, TypeError: the same on every rank; nothing has been changed.
        """
        inputs, opening = self._agree_on_opening(request)
        if opening.trace and report.events is None:
            self.record_events(report)
        holders = find_holders(self._control, request.model, inputs.targets) if opening.lacks_buffers else {}
        drafted = Attempt(lambda: self._make_draft(request, inputs, self._manifest_of(inputs, opening)))
        plan, all_read, owned = self._agree_on_plan(request, inputs, drafted)
        draft = drafted.value
        compare_tied(self._control, self._options.src, inputs, draft.manifest, plan.tied_pairs)
        warn_of_broken_ties(draft.mapping, inputs.targets, draft.manifest, report)
        if inputs.modules is not None:  # else the model is as in the load before, which has warned
            report.warnings += find_unused(request.mapping, draft.manifest.names)
        missing_keys, mismatched_keys = unfilled_anywhere(self._control, inputs, plan)
        missing = compute_missing(
            self._control, request, inputs, plan, [*missing_keys, *mismatched_keys], holders, opening.meta, opening.seed
        )
        ignored = ignored_keys(draft.mapping, draft.manifest.names, missing_keys, plan.unexpected)
        readers, reason = self._options.readers, ""
        if readers == "auto":
            of_rank = dict(zip(self._topology.ranks, owned, strict=True))
            by_node = [[of_rank[rank] for rank in node] for node in self._topology.nodes]
            objects = draft.manifest.in_object_storage
            readers, reason = choose_readers(plan.payload, by_node, all_read=all_read, objects=objects, src=self._options.src)
        return AgreedLoad(
            inputs, draft.manifest, plan, draft.per_wave, readers, reason, all_read, owned, missing_keys,
            mismatched_keys, ignored, missing, opening.meta, opening.verified,
        )  # fmt: skip

    def record_events(self, report: LoadReport) -> None:
        """Starts to record, as events, what this rank does in the load."""
        topology = self._topology
        report.events = self._control.events = Events(topology.rank, topology.nodes.index(topology.node))

    def close(self) -> None:
        """Drops plans and what was read of models."""
        self._plan = None
        self.inputs.close()

    # ---- opening ----

    def _agree_on_opening(self, request: Request) -> tuple[LocalInputs, Opening]:
        def open_own() -> tuple[LocalInputs, Opening]:
            inputs = self.inputs.read(request)
            return inputs, self._opening_message(request, inputs)

        opened = Attempt(open_own)
        message = None if opened.result is None else opened.result[1]
        decision = self._control.agree("opening the checkpoint", opened.failure, message, self._reduce_openings)
        opening = Opening(*decision)
        self._topology.groups.agree(opening.groups)
        return opened.value[0], opening

    def _opening_message(self, request: Request, inputs: LocalInputs) -> Opening:
        described = self._describe_options(inputs.device)
        lacks_buffers = bool(inputs.targets.unsaved_meta)
        asks = " init_missing=reset_parameters" if request.resets else ""
        asks += " init_missing=hook" if callable(request.init_missing) else ""
        asks += " checksums" if request.checksums is not False else ""
        message = Opening(
            loader=self._loader,
            options=f"{described} timeout={self._control.timeout.total_seconds():g} local_modules={inputs.local_modules}{asks}",
            groups=self._topology.groups.count,
            meta=lacks_buffers or inputs.targets.has_meta or has_unfinished(inputs.targets),
            lacks_buffers=lacks_buffers,
            trace=request.trace,
            seed=torch.initial_seed(),
            cached=self.inputs.manifest.identity if self.inputs.manifest is not None else "",
        )
        if self._topology.rank != self._options.src:
            return message
        assert inputs.checkpoint is not None
        manifest = inputs.checkpoint.manifest
        content = b64encode(manifest.compact).decode() if len(self._topology.ranks) > 1 else ""
        return message._replace(
            identity=manifest.identity,
            provenance=manifest.provenance,
            content=content,
            verified=inputs.checkpoint.verified,
        )

    def _reduce_openings(self, views: dict[int, list[Any]]) -> Opening:
        """Runs on the coordinator."""
        messages = {rank: Opening(*view) for rank, view in views.items()}
        check_same_loader({rank: message.loader for rank, message in messages.items()})
        check_same_options({rank: message.options for rank, message in messages.items()})
        source = messages.pop(self._options.src)
        cached = all(message.cached == source.identity for message in messages.values())
        everyone = [source, *messages.values()]
        return source._replace(
            content="" if cached else source.content,
            lacks_buffers=len({message.lacks_buffers for message in everyone}) > 1,
            meta=any(message.meta for message in everyone),
            groups=max(message.groups for message in everyone),
            trace=any(message.trace for message in everyone),
        )

    def _describe_options(self, device: torch.device) -> str:
        """Describes the options that ranks must agree on before they can even share the manifest."""
        o = self._options
        return (
            f"readers={o.readers} algorithm={o.algorithm} src={o.src} bucket_bytes={o.bucket_bytes} "
            f"device={device.type} verify={o.verify}"
        )

    def _manifest_of(self, inputs: LocalInputs, opening: Opening) -> Manifest:
        """Returns the source's manifest."""
        if self._topology.rank == self._options.src:
            assert inputs.checkpoint is not None
            return inputs.checkpoint.manifest
        if opening.content:
            return Manifest.from_compact(b64decode(opening.content), opening.provenance)
        assert self.inputs.manifest is not None
        return self.inputs.manifest.with_provenance(opening.provenance)

    # ---- the plan ----

    def _agree_on_plan(self, request: Request, inputs: LocalInputs, drafted: Attempt[Draft]) -> tuple[LoadPlan, bool, list[int]]:
        """Returns the plan; True if all ranks have opened the checkpoint; the bytes that each rank reads if all read what they
        keep, in the order of the ranks."""
        anywhere = frozenset[int]()
        if drafted.failure is None and inputs.local_modules:
            anywhere = self._wanted_by_any(drafted.value, inputs)
        planned = Attempt(lambda: self._make_checked_plan(request, inputs, drafted.value, anywhere))
        fingerprint, nbytes = "", 0
        if planned.failure is None:
            plan = planned.value
            fingerprint = plan.fingerprint.hex()
            nbytes = plan.spanned if drafted.value.manifest.in_object_storage else plan.owned
        ranks = {*self._topology.ranks}
        claims = [[digest, len(ranks & {*mesh[1]})] for digest, mesh in inputs.targets.mesh_digests]
        view = fingerprint, inputs.checkpoint is not None, nbytes, claims
        same, all_read, owned, mismatched_meshes = self._control.agree(
            "planning", drafted.failure, view, self._compare_plans, patience=2
        )
        if not same:
            self._raise_disagreement(inputs, drafted.value, planned.failure)
        if mismatched_meshes:
            raise_mesh_mismatch(self._control, inputs.targets, mismatched_meshes)
        return planned.value, all_read, owned

    def _compare_plans(self, views: dict[int, Any]) -> tuple[bool, bool, list[int], dict[str, list[int]]]:
        """Runs on the coordinator."""
        ranks = self._topology.ranks
        fingerprints, reads, nbytes, claims = zip(*(views[rank] for rank in ranks), strict=True)
        same = "" not in fingerprints and len({*fingerprints}) == 1
        return same, all(reads), list(nbytes), find_mesh_mismatches(dict(zip(ranks, claims, strict=True)))

    def _make_draft(self, request: Request, inputs: LocalInputs, source: Manifest) -> Draft:
        """``source``: the source's manifest."""
        manifest = self.inputs.join(inputs, request.checkpoint, source)
        mapping = resolve_mapping(request.mapping, request.model, inputs.targets.index, manifest.names, manifest.shapes)
        inputs.targets.check_filled(request.mapping, mapping.only)
        check_held(inputs.targets, mapping.only)
        manifest = with_quantization_of(request.model, manifest)
        readers = self._options.readers
        if readers == "auto":  # chosen once there is a plan, which has the buckets; "every" takes any
            readers = "one" if manifest.locations is None else "partitioned"
        per_wave, bucket_bytes = self._router.bucket_sizes(inputs.device, readers, manifest.nbytes)
        # A stage of a pipeline may lack modules, such as a vision tower, or one of two tied tensors, of which a mapping follows.
        same = replace(mapping, ties=()) if inputs.local_modules else mapping
        is_stage = inputs.local_modules and len(inputs.targets.local_only) == len(inputs.targets.names)
        options = (
            f"{self._describe_options(inputs.device)} strict={request.strict} "
            f"ignore_mismatched_shapes={request.ignore_mismatched_shapes} prefix={request.prefix!r} "
            f"variant={request.variant!r} mapping={'' if is_stage else same}"
        )
        return Draft(manifest, mapping, per_wave, bucket_bytes, options)

    def _make_checked_plan(self, request: Request, inputs: LocalInputs, draft: Draft, anywhere: frozenset[int]) -> LoadPlan:
        """Raises ModelMismatch where the plan is not what ``strict`` and ``ignore_mismatched_shapes`` allow, or fills a lazy
        conjugate."""
        plan, targets = self._make_plan(draft, inputs.targets, anywhere), inputs.targets
        is_new = inputs.modules is not None  # else the model is as in the load before
        for name, tensor in zip(targets.names, targets.tensors, strict=True) if is_new else ():
            if (tensor.is_conj() or tensor.is_neg()) and name not in plan.unfilled:
                raise ModelMismatch(
                    f"{name} is a lazy conjugate or negation, which is never written to: resolve_conj().resolve_neg() it first"
                )
        strict, ignore = request.strict, request.ignore_mismatched_shapes
        check_match(draft.manifest, plan, draft.mapping, strict=strict, ignore_mismatched_shapes=ignore)
        return plan

    def _raise_disagreement(self, inputs: LocalInputs, draft: Draft, failure: Exception | None) -> None:
        """Raises on every rank, in rounds: some rank could not plan, or the plans differ."""
        # A file that was replaced between two ranks' opening it is why they differ.
        self._control.agree("planning", Attempt(inputs.check_unchanged).failure)
        explain_difference(self._control, draft.manifest, inputs.targets, draft.options)
        try:
            self._control.agree("planning", failure)
        except ModelMismatch as error:
            if isinstance(failure, ModelMismatch):
                error.copy_keys(failure)
            raise
        raise ManifestMismatch("the ranks made different plans of the same checkpoint and model, nothing was moved")

    def _wanted_by_any(self, draft: Draft, inputs: LocalInputs) -> frozenset[int]:
        """Numbers of the checkpoint tensors that some rank has a place for. A rank that cannot plan ends the load here; one that
        could not even make a draft reports that in this same round."""
        planned = Attempt(lambda: self._make_plan(draft, inputs.targets, frozenset()))
        unexpected, names = {*planned.value.unexpected} if planned.failure is None else set(), draft.manifest.names
        # What has another shape here is sent too, as is what a tie skips: harmless, and it may fit elsewhere.
        view = hex(int("".join("01"[name not in unexpected] for name in reversed(names)) or "0", 2))
        bits = int(self._control.agree("planning", planned.failure, view, _bitwise_or, patience=2), 16)
        return frozenset(i for i, bit in enumerate(reversed(f"{bits:b}")) if bit == "1")

    def _make_plan(self, draft: Draft, targets: Targets, anywhere: frozenset[int]) -> LoadPlan:
        """Returns the last plan if it was made of the same: a plan depends on nothing but its inputs."""
        mapping = draft.mapping, draft.mapping.places  # which are not compared as part of the mapping
        key = draft.manifest.digest, *mapping, draft.bucket_bytes, draft.options, anywhere
        if self._plan is None or self._plan[0] != key or not targets.matches(self._plan[1]):
            plan = make_plan(draft.manifest, targets, draft.mapping, draft.bucket_bytes, draft.options, anywhere)
        else:
            plan = self._plan[2]
        self._plan = key, replace(targets, tensors=[]), plan  # the next targets may share columns with these
        return plan


def _bitwise_or(views: dict[int, str]) -> str:
    return hex(reduce(or_, (int(text, 16) for text in views.values())))
