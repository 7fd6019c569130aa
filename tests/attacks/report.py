"""What became of each attack: one row, from what the attacker saw and from the learner's ledger.

A row is good when the attack was caught with an expected code within its bound, or was measured to have no effect. A
drift is caught in two steps: the first alarm halves the node's record, for its engine may be one that nobody measured,
and the second puts it out. It is good when the first comes within the bound and the second within twice that. An attack
that could not be played is neither good nor bad.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tests.attacks.attack import Attack, SamplingAttack
from tests.attacks.place import Account, Lab, account_of

SOFT = "result.drift"
"""An offence that is written down and leaves its node in the run."""
ALARMS = 2
"""So many of them put it out."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    attack: str
    kind: str
    generated_tokens: int
    audited_tokens: int
    noticed_tokens: int | None
    bound_tokens: int
    code: str
    accepted: int
    share_trained: float | None
    over_half: int
    over_one: int
    verdict: str
    ok: bool | None
    """None where the attack was not played."""
    skipped: str
    """Why it was not; empty where it was."""
    note: str


def row_of(attack: Attack, lab: Lab) -> Row:
    """The row of an attack that is over."""
    found = account_of(lab, attack.peers, leases=attack.leases)
    verdict, ok, code = judge(attack, found)
    return Row(
        attack=attack.name,
        kind=attack.kind,
        generated_tokens=attack.outcome.tokens,
        audited_tokens=found.audited_tokens,
        noticed_tokens=found.noticed_tokens,
        bound_tokens=attack.bound_tokens,
        code=code,
        accepted=found.accepted,
        share_trained=None if found.share is None else round(found.share, 3),
        over_half=found.over_low,
        over_one=found.over_high,
        verdict=verdict,
        ok=ok,
        skipped=attack.outcome.skipped,
        note=attack.outcome.note,
    )


def judge(attack: Attack, found: Account) -> tuple[str, bool | None, str]:
    """The verdict in words, whether it is good (None: not played), and the code that was seen."""
    codes = attack.outcome.codes
    if attack.outcome.skipped:
        return f"skipped: {attack.outcome.skipped}", None, ""
    if attack.outcome.failure:
        return attack.outcome.failure, False, codes[-1] if codes else ""
    code = next((code for code in codes if code in attack.expects), codes[-1] if codes else "")
    if attack.expects and code in attack.expects:
        bound, noticed = attack.bound_tokens, found.noticed_tokens
        if not isinstance(attack, SamplingAttack) or found.audited_tokens <= bound:
            return "caught", True, code
        words = f"noticed after {noticed or 0:,} audited tokens, out after {found.audited_tokens:,}"
        if noticed is not None and noticed <= bound and found.audited_tokens <= ALARMS * bound:
            return f"caught: {words}", True, code
        return f"caught late: {words}; the bound is {bound:,}", False, code
    if attack.expects:
        if SOFT in found.offences:
            return f"noticed {found.offences.count(SOFT)} times and left in the run", False, SOFT
        if found.audited_tokens < attack.bound_tokens:
            return f"not caught so far: the bound is {attack.bound_tokens:,} audited tokens", False, code
        return "not caught", False, code
    if attack.outcome.no_effect is None:
        return "nothing was shown", False, code or (SOFT if SOFT in found.offences else "")
    if code:
        return "caught, though it was thought to be harmless", True, code
    return ("no effect" if attack.outcome.no_effect else "has an effect"), attack.outcome.no_effect, ""


def table(rows: list[Row]) -> str:
    """For a terminal. A row's note stands below it."""
    width = max(len(row.attack) for row in rows)
    lines = [f"{'attack':<{width}}  generated  audited  code                trained  verdict"]
    for row in rows:
        share = "-" if row.share_trained is None else f"{row.share_trained:.0%} of {row.accepted}"
        lines.append(
            f"{row.attack:<{width}}  {row.generated_tokens:>9,}  {row.audited_tokens:>7,}  {row.code or '-':<18}  "
            f"{share:>10}  {row.verdict}"
        )
        if row.note:
            lines.append(f"{'':<{width}}    {row.note}")
    return "\n".join(lines)


def summary(rows: list[Row], *, failures: list[str]) -> dict[str, object]:
    """Plain values: the rows, whether all that was played went well, what did not, and what was not played.

    ``failures`` are other things that went wrong.
    """
    misses = [row.attack for row in rows if row.ok is False] + failures
    return {
        "rows": [asdict(row) for row in rows],
        "played": sum(row.ok is not None for row in rows),
        "ok": not misses,
        "misses": misses,
        "skipped": [{"attack": row.attack, "reason": row.skipped} for row in rows if row.ok is None],
    }
