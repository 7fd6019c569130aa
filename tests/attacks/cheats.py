"""The cheats of the curve: seats that hand in 30 % of all work, each dishonest in its own way, identity after identity.

=====================  ============  =================================================================================
seat                   of cheats     what it hands in
=====================  ============  =================================================================================
fabricated (two)       1/3 each      nothing is drawn: half of the answers are one wrong sentence said to have earned 1,
                                     the others the right sum said to have earned 0; log-probabilities are made up
seed ignored           1/12          drawn with other seeds than ordered
temperature 0.7        1/12          drawn too cold
padding                1/12          the end of a sequence is never drawn
base relabelled        1/12          drawn with the base model, under the newest root
=====================  ============  =================================================================================

All but the fabricated ones claim a reward of 1 for whatever came out. Claims are in :mod:`.claims`; only the control
listens. A group whose answers all earned the same carries no gradient: hence the halves of fabricated work, which turn
the policy both towards a wrong answer and away from right ones.

Share: two cores cannot carry seven honest engines, so it is 30 % of *offered rollouts* that cheat, not of processes: a
seat takes its next lease while what it has handed in is below its share of 3/7 of what was accepted of honest nodes.
Fabricating costs no engine time, so these seats are as fast as leases come until then.

A cheat that is put out comes back at once with a new key, which is harder on the learner than staying out. Loopback is
free of the bound on new identities, so each seat keeps to it itself, with the learner's own code and its defaults: as
if it sat in a block of addresses of its own, which gives it 64 identities at once and 32 more an hour.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio
from tokenizers import Tokenizer

from rollmesh_learner.members.admission import Registrations
from rollmesh_protocol import limits
from rollmesh_protocol.errors import LinkLost, Refused
from rollmesh_protocol.lease import Lease
from tests.attacks.attack import OUT, SamplingAttack, open_stubborn, reason_of, result_from, say
from tests.attacks.claims import claim_text
from tests.attacks.engine import order_of
from tests.attacks.fabricated import Made, fabricated
from tests.attacks.other_weights import BaseAsNewest
from tests.attacks.place import Lab, open_lab
from tests.attacks.sampling import Colder, Padded, SeedIgnored
from tests.support.attacker import Attacker, result_of
from tests.support.system import System

SHARE: Final = 0.3
"""Of all rollouts that are offered."""
FABRICATED: Final = "fabricated"
BENT: Final[dict[str, type[SamplingAttack]]] = {
    "seed ignored": SeedIgnored,
    "temperature 0.7": Colder,
    "padding": Padded,
    "base relabelled": BaseAsNewest,
}
IMAGES_KEPT: Final = 6
LOOK_S: Final = 0.5
ALIVE_S: Final = 3.0
REST_S: Final = 5.0


@dataclass
class Seat:
    """One cheat under all its identities."""

    kind: str
    share: float
    """Of the cheats' work."""
    number: int
    offered: int = 0
    """Rollouts that were handed in."""
    accepted: int = 0
    """Of those, with a good receipt; an audit may void them afterwards."""
    peers: list[str] = field(default_factory=list)
    codes: Counter[str] = field(default_factory=Counter)

    @property
    def address(self) -> str:
        """Where it would sit, were it not on this machine."""
        return f"/ip4/10.0.{self.number}.1/tcp/4700"


def seats() -> list[Seat]:
    """All of them; their shares are 1 together."""
    kinds = [(FABRICATED, 1 / 3), (FABRICATED, 1 / 3), *((kind, 1 / 12) for kind in BENT)]
    return [Seat(kind, share, number) for number, (kind, share) in enumerate(kinds)]


def may_take(seat: Seat, *, honest: int, share: float = SHARE) -> bool:
    """Whether a seat is behind its part of the cheats' ``share`` of all work, with ``honest`` rollouts by others."""
    return seat.offered < seat.share * share / (1 - share) * honest


class Crowd:
    """All cheats against one run. ``honest`` is kept up to date by whoever watches the learner."""

    def __init__(self, system: System, *, folder: Path, model: Path, base: Path) -> None:
        self.seats = seats()
        self.accepted_of_all = 0
        self._system = system
        self._folder = folder
        self._model = model
        self._base = base
        self._join = ""

    @property
    def honest(self) -> int:
        """Rollouts accepted of others so far."""
        return self.accepted_of_all - sum(seat.accepted for seat in self.seats)

    async def run(self) -> None:
        """Cheat until cancelled."""
        self._join = await self._system.join_line()
        tokenizer = Tokenizer.from_file(str(self._model / "tokenizer.json"))

        async def fabricate(lease: Lease, one: Attacker) -> Made:
            assert one.card is not None
            return fabricated(lease, tokenizer=tokenizer, end=max(one.card.stop_tokens))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run_bent)
            for seat in self.seats:
                if seat.kind == FABRICATED:
                    nursery.start_soon(self._sit, seat, fabricate, lambda: None)

    async def _run_bent(self) -> None:
        """The seats that need an engine share one; it is opened again should its link break."""
        for attempt in range(1_000):
            try:
                async with (
                    open_lab(
                        self._system, self._folder / str(attempt), model=self._model, most_tokens=0, base=self._base
                    ) as lab,
                    trio.open_nursery() as nursery,
                ):
                    nursery.start_soon(_forget_images, lab)
                    for seat in self.seats:
                        if seat.kind != FABRICATED:
                            nursery.start_soon(self._sit, seat, _bend(seat, lab), lambda: lab.studio.newest)
            except* (Refused, LinkLost, trio.TooSlowError) as lost:
                say(f"    the engine of the cheats lost the run: {lost.exceptions[0]}")
            await trio.sleep(REST_S)

    async def _sit(
        self,
        seat: Seat,
        make: Callable[[Lease, Attacker], Awaitable[Made]],
        root: Callable[[], bytes | None],
    ) -> None:
        """Cheat under one identity after the other, as far as new ones are to be had."""
        registrations = Registrations(per_block=limits.MAX_CONNECTIONS_PER_BLOCK)
        while True:
            try:
                registrations.register(seat.address, now=trio.current_time())
                async with open_stubborn(self._join) as one:
                    seat.peers.append(one.peer)
                    await self._cheat(seat, one, make, root)
            except* Refused as refused:
                seat.codes.update(_codes(refused))
            except* (LinkLost, trio.TooSlowError):
                seat.codes["link lost"] += 1
            await trio.sleep(LOOK_S)

    async def _cheat(
        self,
        seat: Seat,
        one: Attacker,
        make: Callable[[Lease, Attacker], Awaitable[Made]],
        root: Callable[[], bytes | None],
    ) -> None:
        """Hand in false work until this identity is out."""
        while True:
            try:
                wants = may_take(seat, honest=self.honest)
                answer = await one.request_work(int(wants), root=root())
                if not answer.leases:
                    await trio.sleep(LOOK_S)
                    continue
                lease = one.open_lease(answer.leases[0])
                samples, rewards = await _alive(one, make, lease)
                receipt = await one.submit(result_of(lease, samples, engine=claim_text(rewards)))
            except Refused as refused:
                seat.codes[reason_of(refused)] += 1
                if refused.code in OUT:
                    return
                await trio.sleep(LOOK_S)
                continue
            seat.offered += len(samples)
            seat.accepted += len(receipt.accepted)
            if receipt.code:
                seat.codes[receipt.code] += 1


def _bend(seat: Seat, lab: Lab) -> Callable[[Lease, Attacker], Awaitable[Made]]:
    attack = BENT[seat.kind]()

    async def make(lease: Lease, one: Attacker) -> Made:
        drawn = await attack.work(order_of(lease, stop=lab.stop), lab)
        samples = list(result_from(lease, drawn, lab).samples)
        return samples, [1.0] * len(samples)

    return make


async def _alive(one: Attacker, make: Callable[[Lease, Attacker], Awaitable[Made]], lease: Lease) -> Made:
    """What ``make`` gives, with signs of life meanwhile."""

    async def live() -> None:
        while True:
            await trio.sleep(ALIVE_S)
            try:
                await one.request_work(0)
            except (Refused, LinkLost):  # whoever hands in the work hears it again
                return

    async with trio.open_nursery() as nursery:
        nursery.start_soon(live)
        made = await make(lease, one)
        nursery.cancel_scope.cancel()
    return made


async def _forget_images(lab: Lab) -> None:
    """Keep the base model and the newest versions: each is a copy of the whole model."""
    while True:
        for root in list(lab.studio.images)[1:-IMAGES_KEPT]:
            lab.studio.images.pop(root).unlink(missing_ok=True)
        await trio.sleep(REST_S)


def _codes(group: ExceptionGroup) -> list[str]:
    codes = []
    for error in group.exceptions:
        codes += _codes(error) if isinstance(error, ExceptionGroup) else [error.code]
    return codes
