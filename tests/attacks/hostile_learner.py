"""A learner that attacks volunteers: each time against one real node process, which works for it when the attack comes.

The node's engine is scripted and its model a few bytes, because what is attacked is the daemon and its weights. It must
say the code, keep the weights that it has, stay small and go on working. Codes are read from the node's own log.
"""

from __future__ import annotations

import json
import pickle
import tempfile
from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from rollmesh_protocol.envelope import seal
from rollmesh_protocol.messages import RunCard
from tests.attacks.attack import Attack
from tests.integration.nodes import NodeProcess, open_learner, start_node, wait_for
from tests.integration.test_node_hostile import HUGE, REMOTE_CODE
from tests.integration.test_node_hostile_weights import Trap
from tests.unit.node.cards import LEARNER, STRANGER, make_card

if TYPE_CHECKING:
    from tests.attacks.place import Lab

WAIT_S = 120.0


async def until(node: NodeProcess, words: str, *, times: int = 1) -> None:
    """Until the node has said so; starting one takes its time on busy cores."""
    with trio.fail_after(WAIT_S):
        while node.log.count(words) < times:
            await trio.sleep(0.1)


# --- cards -----------------------------------------------------------------------------------------------------------
class HostileCard(Attack):
    """A run that asks too much: the node must end with the code before it fetches anything."""

    kind = "learner-against-node"

    @abstractmethod
    def card(self) -> RunCard:
        """What the node is told on joining."""

    async def play(self, lab: Lab) -> None:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            async with open_learner(folder / "learner") as learner:
                card = self.card()
                learner.script.card_bytes = seal(card.encode(), run=card.run, kind="card", identity=LEARNER).encode()
                limits = ("limits.prompt_tokens=1000",)
                with start_node(folder / "home", learner.mesh.addresses[0], settings=limits) as node:
                    status = await node.wait(WAIT_S)
                    self.outcome.codes += [code for code in self.expects if status == 1 and f"({code})" in node.log]
                    fetched = list((folder / "home").glob("node/runs/*/edges/*"))
                    self.outcome.note = f"the node ended with status {status}; {len(fetched)} files fetched"


class RemoteCode(HostileCard):
    name = "remote code named in the model's config"
    expects = frozenset({"card.model"})

    def card(self) -> RunCard:
        return make_card(config=REMOTE_CODE)


class HugePrompts(HostileCard):
    name = "run with prompts of 32,768 tokens"
    expects = frozenset({"card.limits"})

    def card(self) -> RunCard:
        return make_card(prompt_tokens=32_768)


class HugeModel(HostileCard):
    name = "model of 256 GiB to download"
    expects = frozenset({"card.limits"})

    def card(self) -> RunCard:
        return make_card(layout=HUGE)


class Pickled(Attack):
    """The model folder holds a pickle that touches a file, and the volunteer was talked into naming it."""

    name = "pickled weights in the model folder"
    kind = "learner-against-node"

    async def play(self, lab: Lab) -> None:
        with tempfile.TemporaryDirectory() as made:
            folder, trap = Path(made) / "model", Path(made) / "trap"
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
            (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(trap)))
            async with open_learner(Path(made) / "learner") as learner:
                named = (f"weights.base={folder}",)
                with start_node(Path(made) / "home", learner.mesh.addresses[0], settings=named) as node:
                    await until(node, "holds its weights as pickle")
                    await wait_for(learner, lambda seen: seen.heard.accepted)
            self.outcome.no_effect = not trap.exists()
            self.outcome.note = "the file was named and not opened; the node took the run's own weights"


# --- leases ----------------------------------------------------------------------------------------------------------
class HostileLease(Attack):
    """Orders that a node must not obey; afterwards an honest order is served again."""

    kind = "learner-against-node"

    def script(self) -> dict[str, object]:
        raise NotImplementedError

    async def play(self, lab: Lab) -> None:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            async with open_learner(folder / "learner") as learner:
                good = learner.script
                learner.script = replace(good, **self.script())
                with start_node(folder / "home", learner.mesh.addresses[0]) as node:
                    (code,) = self.expects
                    await until(node, f"code={code}", times=3)
                    obeyed = len(learner.heard.submitted)
                    learner.script = replace(good, lease_signer=None)
                    await wait_for(learner, lambda seen: seen.heard.accepted)
            self.outcome.codes += [code] if not obeyed else []
            self.outcome.note = f"{obeyed} of three orders obeyed; an honest order was served afterwards"


class ForgedLease(HostileLease):
    name = "lease signed by somebody else"
    expects = frozenset({"envelope.key"})

    def script(self) -> dict[str, object]:
        return {"lease_signer": STRANGER}


class HugeLease(HostileLease):
    name = "lease with a prompt of 32,768 tokens"
    expects = frozenset({"lease.limits"})

    def script(self) -> dict[str, object]:
        return {"prompt": b"\5\0\0\0" * 32_768}


class EndlessLease(HostileLease):
    name = "lease of 32,768 new tokens"
    expects = frozenset({"lease.limits"})

    def script(self) -> dict[str, object]:
        return {"max_new_tokens": 32_768}
