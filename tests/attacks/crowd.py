"""Many identities from one address. Loopback is free of the limit, so the run lies in a network namespace of its own.

    unshare --net python -m tests.attacks.crowd

starts a learner of the tiny model on an address of the namespace, brings identities side by side, one after the other,
and then all that were let in at once, and prints one JSON object. Only root may make namespaces; without, the attack is
skipped and says so.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from rollmesh_protocol.errors import Refused
from rollmesh_protocol.identity import Identity
from tests.attacks.attack import Attack
from tests.support.attacker import open_attacker
from tests.support.system import System, open_system

if TYPE_CHECKING:
    from tests.attacks.place import Lab

ADDRESS: Final = "10.77.0.1"
PER_BLOCK: Final = 4
TRIES: Final = 20
CHILD_S: Final = 300.0


class ManyIdentities(Attack):
    name = "many identities from one address"
    kind = "protocol"
    expects = frozenset({"node.too_many"})

    async def play(self, lab: Lab) -> None:
        if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "ip"))):
            self.outcome.skipped = "it needs root, unshare and ip: loopback has no such limit"
            return
        command = ["unshare", "--net", sys.executable, "-m", "tests.attacks.crowd"]
        with trio.fail_after(CHILD_S):
            done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.decode(errors="replace")[-300:])
        found = json.loads(done.stdout.splitlines()[-1])
        is_held = max(found["together"], found["back"]) <= PER_BLOCK
        self.outcome.codes += found["codes"] if is_held else []
        self.outcome.note = (
            f"with per_block = {PER_BLOCK}: {found['together']} side by side, {found['in_turn']} one after the other, "
            f"and of all of them {found['back']} when they came back together"
        )


def main() -> int:
    """Inside the namespace: a learner, and as many identities as it takes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the learner must not outlive a lab that gives up
    for words in (("link", "set", "lo", "up"), ("addr", "add", f"{ADDRESS}/24", "dev", "lo")):
        subprocess.run(["ip", *words], check=True, timeout=10)
    settings = (f'network.listen=["/ip4/{ADDRESS}/tcp/4700"]', f"admission.per_block={PER_BLOCK}")
    with tempfile.TemporaryDirectory() as made, open_system(Path(made), *settings, steps=1000) as system:
        print(json.dumps(trio.run(_crowd, system)))
    return 0


async def _crowd(system: System) -> dict[str, object]:
    await system.learner.until_logged("rollmesh node run --join ", timeout_s=CHILD_S)
    join = await system.join_line()
    codes: set[str] = set()
    fresh = [Identity(secrets.token_bytes(32)) for _ in range(2 * TRIES)]
    async with AsyncExitStack() as stack:
        together = await _admitted(join, fresh[:TRIES], codes, stack=stack)
    in_turn = await _admitted(join, fresh[TRIES:], codes)
    async with AsyncExitStack() as stack:
        back = await _admitted(join, together + in_turn, codes, stack=stack)
    return {"codes": sorted(codes), "together": len(together), "in_turn": len(in_turn), "back": len(back)}


async def _admitted(
    join: str, identities: list[Identity], codes: set[str], *, stack: AsyncExitStack | None = None
) -> list[Identity]:
    """Those that are let in before the first is refused; with ``stack`` they stay, else each is gone before the next.

    ``codes`` takes the code of the refusal.
    """
    admitted: list[Identity] = []
    for identity in identities:
        async with AsyncExitStack() as own:
            one = await (stack or own).enter_async_context(open_attacker(join, identity=identity, hello=False))
            try:
                await one.hello()
            except Refused as refused:
                codes.add(refused.code)
                break
        admitted.append(identity)
    return admitted


if __name__ == "__main__":
    sys.exit(main())
