"""A status as a person sees it: a headline, a few facts, and one line for each peer. Pure; ``rich`` draws it.

Every word that a peer chose goes through :func:`~rollmesh_peer.status.words.clean` and is never read as markup. Columns
that do not fit the width are left out, least telling first; what the peers wait for then stands below the table.
Nothing is ever cut from a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rollmesh_peer.status.words import ABSENT, ago, clean, count, duration, percent, rate, share, size
from rollmesh_protocol import limits
from rollmesh_protocol.identity import short
from rollmesh_protocol.messages import Standing
from rollmesh_protocol.status import (
    LengthStatus,
    NodeStatus,
    PeerStatus,
    RunStatus,
    SpreadStatus,
    StatusAnswer,
    TrustStatus,
)

STANDING_STYLES: Final = {"new": "default", "probation": "yellow", "full": "green", "quarantined": "bold red"}
WAIT_CHARS: Final = 60
GUTTER: Final = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Column:
    """One column of the table of peers. ``keep`` orders them: the highest number is dropped first."""

    title: str
    cell: Callable[[PeerStatus], Text]
    keep: int
    justify: Literal["left", "right"] = "left"
    least: int = 0
    """Narrowest useful width; 0 when the cells may not be shortened."""


def render(answer: StatusAnswer, *, width: int) -> RenderableType:
    """``answer`` for a terminal of ``width`` columns."""
    parts: list[RenderableType] = []
    if answer.run is not None:
        parts += _run(answer.run, width=width)
    if answer.node is not None:
        parts += _node(answer.node)
    return Group(*parts)


# --- the run ---------------------------------------------------------------------------------------------------------
def _run(run: RunStatus, *, width: int) -> list[RenderableType]:
    headline = Text.assemble(
        (clean(run.name, limit=60), "bold"), "  ", (f"learner {_peer(run.learner)}", "dim"), "  ",
        (f"up {duration(run.uptime_s)}", "dim"),
    )  # fmt: skip
    reward = ABSENT if run.mean_reward is None else f"{run.mean_reward:.3f}"
    live = [peer for peer in run.peers if peer.connected]
    pooled = sum(peer.tokens_per_s for peer in live)
    facts = [
        ("state", Text(clean(run.state))),
        ("step", Text(f"{count(run.step)} of {count(run.steps)}" if run.steps else count(run.step))),
        ("head", _head(run)),
        *(("spread", Text(_spread(spread))) for spread in run.spread),
        ("reward", Text(reward)),
        *_rollbacks(run),
        ("groups", Text(f"{count(run.groups_leased)} leased, {count(run.groups_ready)} ready")),
        ("rollouts", _outcome(run.rollouts_accepted, run.rollouts_rejected)),
        ("audits", _audits(run)),
        *_trust(run.trust),
        ("bubble", Text(f"{100 * run.bubble_fraction:.1f} %")),
        *((title, Text(clean(sentence))) for title, sentence in map(_child, run.children)),
    ]
    peers = f"{len(live)} of {len(run.peers)} connected" if run.pages == 1 else f"page {run.page + 1} of {run.pages}"
    title = Text.assemble(("peers", "bold"), "  ", (f"{peers}, {rate(pooled)} tokens/s", "dim"))
    below: RenderableType = _peers(run.peers, width=width) if run.peers else _nobody()
    return [headline, Text(), _facts(facts), Text(), title, below]


def _rollbacks(run: RunStatus) -> list[tuple[str, Text]]:
    if not run.rollbacks:
        return []
    return [("rollbacks", Text.assemble((count(run.rollbacks), "yellow"), f"; {clean(run.last_rollback)}"))]


def _nobody() -> Text:
    return Text("  nobody yet: give the join line to a volunteer (rollmesh node run --join <line>)", style="dim")


def _peers(peers: Iterable[PeerStatus], *, width: int) -> RenderableType:
    rows = sorted(peers, key=lambda peer: (not peer.connected, -peer.standing.accepted, peer.peer))
    widths = _fitting(rows, width=width)
    table = Table(box=None, padding=(0, GUTTER, 0, 0), pad_edge=False, header_style="dim", show_edge=False)
    room = width - sum(widths.values()) - GUTTER * (len(widths) - 1)
    for column, least in widths.items():
        wide = min(WAIT_CHARS, least + room) if column.least else least
        table.add_column(column.title, justify=column.justify, no_wrap=True, overflow="ellipsis", width=wide)
    for peer in rows:
        table.add_row(*(column.cell(peer) for column in widths), style="" if peer.connected else "dim")
    waits = [
        Text.assemble(("  ", ""), (_peer(peer.peer), "dim"), "  ", _waiting(peer))
        for peer in rows
        if _WAITS not in widths and _waiting(peer)
    ]
    return Group(table, Text("waiting for", style="dim"), *waits) if waits else table


def _fitting(rows: list[PeerStatus], *, width: int) -> dict[Column, int]:
    """The columns that fit into ``width``, with their widths; one that says nothing about anybody is left out."""
    widths = {}
    for column in _COLUMNS:
        cells = [column.cell(peer).cell_len for peer in rows]
        if column.keep and not any(cells):
            continue
        widest = max(cells, default=0)
        widths[column] = max(len(column.title), min(widest, column.least) if column.least else widest)
    while len(widths) > 1 and sum(widths.values()) + GUTTER * (len(widths) - 1) > width:
        del widths[max(widths, key=lambda column: column.keep)]
    return widths


_WAITS: Final = Column(title="waiting for", keep=6, least=32, cell=lambda peer: Text(_waiting(peer)))
_COLUMNS: Final = (
    Column(title="peer", keep=0, cell=lambda peer: Text.assemble(_dot(peer), " ", _peer(peer.peer))),
    Column(title="name", keep=4, cell=lambda peer: Text(clean(peer.name, limit=14))),
    Column(title="role", keep=9, cell=lambda peer: Text(clean(peer.role, limit=8))),
    Column(title="engine", keep=10, cell=lambda peer: Text(clean(peer.engine, limit=32))),
    Column(title="link", keep=8, cell=lambda peer: Text("" if peer.path == "none" else peer.path)),
    Column(title="version", keep=2, justify="right", cell=lambda peer: Text(count(peer.version))),
    Column(title="tok/s", keep=3, justify="right", cell=lambda peer: Text(rate(peer.tokens_per_s))),
    Column(title="leased", keep=7, justify="right", cell=lambda peer: Text(count(peer.leased_samples))),
    Column(title="accepted", keep=1, justify="right", cell=lambda peer: Text(count(peer.standing.accepted))),
    Column(
        title="rejected",
        keep=3,
        justify="right",
        cell=lambda peer: Text(count(peer.standing.rejected), style="red" if peer.standing.rejected else ""),
    ),
    Column(title="last accepted", keep=5, cell=lambda peer: Text(ago(peer.last_accepted_s))),
    Column(title="standing", keep=3, cell=lambda peer: _standing(peer.standing)),
    _WAITS,
)


def _dot(peer: PeerStatus) -> Text:
    if peer.standing.state == "quarantined":
        return Text("✕", style="bold red")
    return Text("●", style="green") if peer.connected else Text("○", style="dim")


def _waiting(peer: PeerStatus) -> str:
    if not peer.connected and peer.last_seen_s > limits.DEAD_AFTER_S:
        return f"gone, last seen {ago(peer.last_seen_s)}"
    if peer.standing.state == "quarantined" and peer.standing.reason:
        return clean(peer.standing.reason, limit=WAIT_CHARS)
    return clean(peer.waiting_for or peer.withheld, limit=WAIT_CHARS)


# --- one node --------------------------------------------------------------------------------------------------------
def _node(node: NodeStatus) -> list[RenderableType]:
    headline = Text.assemble(
        (clean(node.name, limit=60) or "node", "bold"), "  ", (_peer(node.peer), "dim"), "  ",
        (f"up {duration(node.uptime_s)}", "dim"),
    )  # fmt: skip
    link = Text("connected", style="green") if node.learner_connected else Text("not connected", style="yellow")
    held = (
        f"version {count(node.version_held)}" if node.version_held else "the base model" if node.root_held else "none"
    )
    if node.head is not None and node.version_held != node.head.version:
        held += f", head is version {count(node.head.version)}"
    fetched = node.bytes_from_learner + node.bytes_from_peers
    facts = [
        ("run", Text(clean(node.run, limit=64) or "not joined yet")),
        ("learner", Text.assemble(f"{_peer(node.learner)}, ", link)),
        ("doing", Text(clean(node.waiting_for) or f"generating, {rate(node.tokens_per_s)} tokens/s")),
        ("engine", Text(clean(node.engine) or "none")),
        *([("chosen", Text(clean(node.engine_why, limit=400)))] if node.engine_why else []),
        ("weights", Text(held)),
        ("leases", Text(f"{count(node.leases_open)} open")),
        ("rollouts", _outcome(node.accepted, node.rejected)),
        ("last accepted", Text(ago(node.last_accepted_s))),
        ("standing", Text(ABSENT) if node.standing is None else _standing(node.standing, reason=True)),
        ("fetched", Text(_fetched(node) if fetched else "nothing yet")),
        ("served", Text(f"{size(node.bytes_served)} to {count(node.neighbours)} neighbours")),
    ]
    if node.last_refusal:
        facts.append(("last refusal", Text(clean(node.last_refusal, limit=400), style="yellow")))
    return [headline, Text(), _facts(facts)]


def _fetched(node: NodeStatus) -> str:
    fetched = node.bytes_from_learner + node.bytes_from_peers
    return f"{size(fetched)}, {share(node.bytes_from_peers, fetched)} of it from peers"


# --- pieces ----------------------------------------------------------------------------------------------------------
def _facts(facts: Iterable[tuple[str, Text]]) -> Padding:
    table = Table(box=None, padding=(0, GUTTER, 0, 0), pad_edge=False, show_header=False, show_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for title, value in facts:
        table.add_row(title, value)
    return Padding(table, (0, 0, 0, 2))


def _spread(spread: SpreadStatus) -> str:
    """One line: how far a version has come, by whom, and who is slowest."""
    if not spread.holding:
        return f"version {count(spread.version)}: no node holds it yet"
    who = f"{count(spread.holding)} of {count(spread.online)} nodes"
    when = [
        f"{what} after {duration(seconds)}"
        for what, seconds in (("9 in 10", spread.most_s), ("all", spread.last_s))
        if seconds is not None
    ]
    fetched = spread.holding * spread.head_bytes
    peers = max(0, fetched - spread.bytes_from_learner)
    parts = [f"version {count(spread.version)}: {who}", *when]
    if fetched:
        parts.append(f"{share(peers, fetched)} from peers")
    if spread.slowest:
        parts.append(f"slowest {clean(', '.join(spread.slowest), limit=60)}")
    return ", ".join(parts)


def _child(sentence: str) -> tuple[str, str]:
    """``trainer: step 12, 4.1 s`` as a fact of its own."""
    title, colon, rest = sentence.partition(": ")
    return (clean(title, limit=16), rest) if colon and len(title) <= 16 else ("process", sentence)


def _peer(peer: str) -> str:
    return f"..{clean(short(peer))}"


def _head(run: RunStatus) -> Text:
    head = run.head
    if not head.version:
        return Text("nothing published yet")
    is_patch = 0 < run.head_bytes < run.model_bytes
    patch = f"a patch of {size(run.head_bytes)} for {size(run.model_bytes)} of weights  " if is_patch else ""
    return Text.assemble(f"version {count(head.version)}  ", patch, (f"root {head.root.hex()[:12]}", "dim"))


def _outcome(accepted: int, rejected: int) -> Text:
    return Text.assemble(f"{count(accepted)} accepted, ", (f"{count(rejected)} rejected", "red" if rejected else ""))


def _audits(run: RunStatus) -> Text:
    trust, failed = run.trust, run.audits_failed
    text = Text.assemble(f"{count(run.audits_done)} done, ", (f"{count(failed)} failed", "red" if failed else ""))
    if trust.audits_waiting:
        text.append(f", {count(trust.audits_waiting)} waiting (at most {count(trust.audits_most)})")
    if trust.work_tokens:
        text.append(f"; {percent(trust.audited_tokens, trust.work_tokens)} of all tokens")
    if trust.steady_work_tokens:
        text.append(f", {percent(trust.steady_audited_tokens, trust.steady_work_tokens)} in full standing")
    return text


def _trust(trust: TrustStatus) -> list[tuple[str, Text]]:
    """What went wrong, and how long the dropped answers were beside the consumed ones; nothing where nothing was."""
    facts = []
    if trust.consumed_bad or trust.reaudits_waiting or trust.reaudits_missed:
        steps = f", in steps {', '.join(map(str, trust.consumed_bad_steps))}" if trust.consumed_bad_steps else ""
        left = f"; {count(trust.reaudits_waiting)} to look at again" if trust.reaudits_waiting else ""
        left += f"; {count(trust.reaudits_missed)} cannot be looked at again" if trust.reaudits_missed else ""
        style = "red" if trust.consumed_bad else ""
        facts.append(("consumed", Text(f"{count(trust.consumed_bad)} rollouts failed later{steps}{left}", style=style)))
    if trust.over_cap:
        facts.append(("shares", Text(f"{count(trust.over_cap)} rollouts above their node's share of a batch")))
    if any(row.dropped for row in trust.lengths):
        facts.append(("dropped", Text(_lengths(trust.lengths))))
    return facts


def _lengths(rows: Iterable[LengthStatus]) -> str:
    """``8+ tokens 25 of 325``: dropped of all, by length."""
    return ", ".join(f"{count(row.tokens)}+ tokens {count(row.dropped)} of {count(row.dropped + row.consumed)}"
                     for row in rows)  # fmt: skip


def _standing(standing: Standing, *, reason: bool = False) -> Text:
    text = Text(standing.state, style=STANDING_STYLES[standing.state])
    if reason and standing.reason:
        text.append(f": {clean(standing.reason)}")
    return text
