"""Runs the learner's checks on a node's own work: its last results, and fresh ones of its engine.

    journal --entries--> check_result --those whose weights are on disk--> recheck child --> findings
    journal's prompts --> engine child, as configured --> check_result --> recheck child --> findings

The invariants: torch is in the children only; weights are private copies, verified by their root, so nothing of a
running daemon is locked, held up or changed; memory and disk are looked at before anything is loaded, and one child
computes at a time. What cannot be checked is said, with its reason, and never taken for a pass or a fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import trio

from rollmesh_node.generator import LOAD_S, EngineSetting
from rollmesh_node.introduction import CARD, RUNS, run_place
from rollmesh_node.joining import read_card
from rollmesh_node.journal import JOURNAL, Entry, Notes, read_journal
from rollmesh_node.memory import engine_bytes
from rollmesh_node.selfcheck.figures import Figures, figures_of
from rollmesh_node.selfcheck.findings import (
    Finding,
    explain,
    explain_both,
    explain_form,
    explain_lateness,
)
from rollmesh_node.selfcheck.fresh_work import fresh_leases, generate
from rollmesh_node.selfcheck.pieces import Piece, pieces_of
from rollmesh_node.selfcheck.rechecking import Recomputed, recheck, recheck_spec
from rollmesh_node.selfcheck.report import Report
from rollmesh_peer.children.process import open_child
from rollmesh_peer.free_memory import free_bytes
from rollmesh_peer.weights.copies import Copies, Way, find_way, open_copies, working_files
from rollmesh_protocol.errors import HostError, Refused, RollmeshError
from rollmesh_protocol.lease import Lease
from rollmesh_protocol.messages import RunCard, Standing
from rollmesh_protocol.rollout import Result, Rollout, check_result
from rollmesh_protocol.verdicts.judging import Judging
from rollmesh_protocol.verdicts.margins import Thresholds

FRESH_TOKENS: Final = 1000
"""Tokens that are generated for a check, at least: the learner's own verdict over a window takes 200."""
MOST_ROOTS: Final = 3
"""Versions under which the last results are recomputed: each is loaded for it."""
COPIES: Final = "selfcheck"
"""The folder of private copies in the run's folder."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is to be checked, and how. ``engine`` is the node's own; ``recheck_device`` empty: that of the engine.

    ``thresholds`` take the place of those of the run card.
    """

    folder: Path
    engine: EngineSetting
    ram_folder: Path | None
    thresholds: Thresholds | None = None
    fresh_tokens: int = FRESH_TOKENS
    """0 for none."""
    recheck_device: str = ""


async def selfcheck(order: Order) -> Report:
    """Check what there is to check; what cannot be is among the report's notes."""
    report = Report()
    try:
        notes = await trio.to_thread.run_sync(read_journal, order.folder / JOURNAL)
        if notes is None:
            report.notes.append("this node has kept no results yet")
    except HostError as error:
        notes = None
        report.notes.append(error.detail)
    place, card = await trio.to_thread.run_sync(_find_run, order.folder, notes)
    report.run = card.name or card.run
    report.judging = Judging.read(card.checks)
    if order.thresholds is not None:
        report.judging = replace(report.judging, thresholds=order.thresholds)
    check = _Check(order, card=card, place=place, report=report)
    entries = notes.entries if notes is not None else ()
    good = check.note_entries(entries, standing=notes.standing if notes is not None else None)
    try:
        await check.recompute(good, prompts=entries)
    except RollmeshError as error:
        report.notes.append(error.detail)
    check.conclude()
    return report


class _Check:
    """One selfcheck of one run."""

    def __init__(self, order: Order, *, card: RunCard, place: Path, report: Report) -> None:
        self._order = order
        self._card = card
        self._place = place
        self._report = report
        self._stop = frozenset(card.stop_tokens)
        self._kept = Recomputed()
        self._fresh = Recomputed()

    # --- what needs no weights ---------------------------------------------------------------------------------------
    def note_entries(self, entries: Sequence[Entry], *, standing: Standing | None) -> list[Rollout]:
        """Count the last results and hold them against layer L3; the rollouts of those that pass."""
        report, wrong, good = self._report, dict[str, str](), list[Rollout]()
        report.results, report.standing = len(entries), standing
        report.rollouts = sum(len(entry.result.samples) for entry in entries)
        for entry in entries:
            if entry.answer is not None and entry.answer.code is not None:
                report.refusals[entry.answer.code] += 1
            try:
                good += self._open(entry.result, entry.lease)
            except Refused as refusal:
                wrong.setdefault(refusal.code, refusal.detail)
        report.findings += [*explain_form(wrong), *explain_lateness(entries)]
        return good

    def _open(self, result: Result, lease: Lease) -> list[Rollout]:
        """The rollouts of a result, one by one. Which versions there were to take only the learner knows."""
        leased = {sample.index: sample for sample in lease.samples}
        good: list[Rollout] = []
        for sample in result.samples:
            one = lease.model_copy(update={"samples": (leased[sample.index],)}) if sample.index in leased else lease
            swaps = [(lease.version + place, segment.root) for place, segment in enumerate(sample.segments, 1)]
            good += check_result(
                result.model_copy(update={"samples": (sample,)}), one, vocabulary=self._card.vocabulary,
                stop_tokens=self._stop, swaps=swaps,
            )  # fmt: skip
        if sorted(rollout.index for rollout in good) != sorted(leased):
            raise Refused("result.samples")
        return good

    # --- what needs them ---------------------------------------------------------------------------------------------
    async def recompute(self, kept: Sequence[Rollout], *, prompts: Sequence[Entry]) -> None:
        """Generate afresh, then recompute that and the last results. HostError, ChildFailed, Refused: why not."""
        order = self._order
        if not order.engine.is_model:
            raise HostError("this node's engine has no model whose work could be recomputed")
        weights = self._place / "weights"
        way = await trio.to_thread.run_sync(lambda: find_way(weights, self._place / "edges", card=self._card))
        if way is None:
            raise HostError("this node holds no weights of the run on its disk: let it run until it has fetched some")
        self._check_memory()
        by_root = _by_root(kept, way)
        missing = sum(any(segment.root not in by_root for segment in rollout.segments) for rollout in kept)
        if missing:
            self._report.notes.append(f"{missing} rollouts were not recomputed: their weights are no longer at hand")
        newest = list(way.roots)[-1]
        working = working_files(weights, ram_folder=order.ram_folder)
        async with open_copies(self._place / COPIES, way=way, layout=self._card.layout, working=working) as copies:
            image = await copies.make(newest)
            fresh = await self._generate(image, prompts, way=way)
            roots = ([newest] if fresh or newest in by_root else []) + [root for root in by_root if root != newest]
            await self._recheck(copies, roots, by_root=by_root, fresh=fresh, newest=newest)
        self._report.versions = tuple(way.roots[root] for root in roots)

    def _check_memory(self) -> None:
        setting, layout = self._order.engine, self._card.layout
        is_wide = setting.declared.dtype == "float32"
        on_cpu = "cpu" in (setting.declared.device, self._order.recheck_device)
        needed = engine_bytes(layout, on_cpu=on_cpu) + (layout.image_bytes if is_wide else 0)
        free = free_bytes()
        if free is not None and free < needed:
            raise HostError(
                f"a selfcheck needs {needed / 1e9:.2f} GB of memory and {free / 1e9:.2f} GB are free: "
                "close other programs, or stop the node first"
            )

    async def _generate(self, image: Path, entries: Sequence[Entry], *, way: Way) -> list[Rollout]:
        """Fresh rollouts of the node's own engine, with the weights in ``image``, that pass layer L3."""
        if not self._order.fresh_tokens:
            return []
        root, version = list(way.roots.items())[-1]
        leases = fresh_leases(entries, card=self._card, root=root, version=max(1, version))
        good: list[Rollout] = []
        wrong: dict[str, str] = {}
        report = self._report
        try:
            work = await generate(
                self._order.engine, leases, model=self._model() | {"image": str(image)}, stop=self._stop,
                least_tokens=self._order.fresh_tokens,
            )  # fmt: skip
        except RollmeshError as error:
            report.notes.append(f"nothing was generated afresh: {error.detail}")
            return []
        if work.failure:
            report.findings.append(Finding(kind="engine", detail=work.failure))
        for lease, result in work.results:
            try:
                good += self._open(result, lease)
            except Refused as refusal:
                wrong.setdefault(refusal.code, refusal.detail)
        known = {finding.kind for finding in report.findings}
        report.findings += [finding for finding in explain_form(wrong) if finding.kind not in known]
        return good

    async def _recheck(
        self,
        copies: Copies,
        roots: Sequence[bytes],
        *,
        by_root: Mapping[bytes, Sequence[Piece]],
        fresh: Sequence[Rollout],
        newest: bytes,
    ) -> None:
        """Recompute under each root in one child. ``copies`` holds ``newest`` when this is called."""
        if not roots:
            return
        order, load = self._order, self._order.engine.load
        opening = self._model() | {
            "threads": load.get("threads"),
            "device": order.recheck_device or load.get("device"),
        }
        async with open_child(recheck_spec(order.engine.spec)) as child:
            self._report.device = str((await child.call("open", opening, deadline_s=LOAD_S)).get("device"))
            for root in roots:
                image = await copies.make(root) if root != newest else copies.file
                await child.call("load", {"image": str(image)}, deadline_s=LOAD_S)
                await recheck(child, by_root.get(root, ()), into=self._kept, judging=self._report.judging)
                if root == newest:
                    await recheck(child, _pieces(fresh), into=self._fresh, judging=self._report.judging)

    def _model(self) -> dict[str, object]:
        return {"config_json": self._card.model.config.decode(), "layout": self._card.layout.encode()}

    # --- what it comes to --------------------------------------------------------------------------------------------
    def conclude(self) -> None:
        """Put figures and findings into the report."""
        report = self._report
        explained: list[Finding | None] = []
        told: list[Figures | None] = []
        thresholds = report.judging.thresholds
        for part in (self._kept, self._fresh):
            rollouts = part.rollouts
            figures = figures_of(rollouts, report.judging)
            told.append(figures)
            explained.append(
                explain(rollouts, figures, guesses=part.guesses, thresholds=thresholds) if figures else None
            )
        report.kept, report.fresh = told
        known = {finding.kind for finding in report.findings}
        more = explain_both(*explained, is_fresh_checked=report.fresh is not None)
        report.findings += [finding for finding in more if finding.kind not in known]


def _find_run(folder: Path, notes: Notes | None) -> tuple[Path, RunCard]:
    """The folder and card of the journal's run, or of the one that was last worked for. HostError: there is none."""
    if notes is not None:
        places = [run_place(folder, learner=notes.learner, run=notes.run)]
    else:
        cards = [path for path in (folder / RUNS).glob(f"*/{CARD}") if path.is_file()]
        places = [path.parent for path in sorted(cards, key=lambda path: path.parent.stat().st_mtime)]
    if not places:
        raise HostError(f"the node in {folder} has not taken part in any run yet: let it join one first")
    card = read_card(places[-1] / CARD)
    if card is None:
        raise HostError(f"the run card {places[-1] / CARD} is not there: let the node join the run again")
    return places[-1], card


def _pieces(rollouts: Sequence[Rollout]) -> list[Piece]:
    return [piece for number, rollout in enumerate(rollouts) for piece in pieces_of(rollout, number=number)]


def _by_root(rollouts: Sequence[Rollout], way: Way) -> dict[bytes, list[Piece]]:
    """The pieces that can be recomputed, by root: of the versions at hand the ones with the most, and the newest."""
    at_hand = way.roots
    found: dict[bytes, list[Piece]] = {root: [] for root in reversed(at_hand)}
    for piece in _pieces(rollouts):
        if piece.root in found:
            found[piece.root].append(piece)
    chosen = sorted(found, key=lambda root: len(found[root]), reverse=True)[:MOST_ROOTS]
    return {root: found[root] for root in chosen if found[root]}
