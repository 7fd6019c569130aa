"""The account of trust as ``status`` shows it: what audits cost, what they found too late, and what was dropped."""

from __future__ import annotations

from rollmesh_learner.audit.auditor import Auditor
from rollmesh_learner.audit.drawing import Drawer
from rollmesh_learner.work.book import Book
from rollmesh_learner.work.lengths import in_order
from rollmesh_protocol.status import MOST_BAD_STEPS, LengthStatus, TrustStatus


def trust_status(*, book: Book, auditor: Auditor, drawer: Drawer, queue: int) -> TrustStatus:
    """As of now. ``queue`` is how many rollouts may wait for audit."""
    bad = auditor.reaudits.bad
    return TrustStatus(
        audits_waiting=sum(1 for _ in book.pending("auditing")),
        audits_most=queue,
        audited_tokens=auditor.audited_tokens,
        work_tokens=drawer.work_tokens,
        steady_audited_tokens=drawer.means.drawn_tokens,
        steady_work_tokens=drawer.means.work_tokens,
        consumed_bad=bad.total(),
        consumed_bad_steps=tuple(sorted(bad)[-MOST_BAD_STEPS:]),
        reaudits_waiting=len(auditor.reaudits.cases),
        reaudits_missed=auditor.reaudits.left_out,
        over_cap=book.tally.over_cap,
        lengths=tuple(
            LengthStatus(tokens=bucket, consumed=row["consumed"], dropped=row["dropped"])
            for bucket, row in in_order(book.tally.lengths).items()
        ),
    )
