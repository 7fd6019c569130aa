"""Shows a run and its peers, or the node and learner on this machine.

``rollmesh status``: without a join line it asks the daemons of this user over their control sockets; with one it asks
the learner over the mesh. For people by default, ``--json`` for programs (one object a line with ``--watch``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

from rollmesh_protocol.errors import LinkLost
from rollmesh_protocol.status import StatusAnswer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from rollmesh_peer.command import SubParsers
    from rollmesh_peer.mesh.join import JoinLine

EVERY_S: Final = 1.0
"""Between two looks of ``--watch``: daemons build a status once a second."""
PLAIN_EVERY_S: Final = 5.0
"""The same when the output is no terminal, where every look adds lines."""
PLAIN_WIDTH: Final = 160
"""Columns when the output is no terminal: nothing is left out."""

Fetch = Callable[[], Awaitable[Sequence[StatusAnswer]]]
"""Every status that is to be shown. Raises LinkLost when nobody answers."""


def add_parser(subparsers: SubParsers) -> object:
    """Add ``status``."""
    parser = subparsers.add_parser(
        "status",
        help="show a run and its peers",
        description="Show a run and its peers, or the node and learner of this user on this machine.",
    )
    parser.add_argument("--join", metavar="LINE", help="ask the learner of this join line instead of this machine")
    parser.add_argument("--json", action="store_true", help="print JSON, one object for each daemon")
    parser.add_argument("--watch", action="store_true", help="go on until Ctrl-C")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Show what was asked for; 0 once something answered."""
    import trio
    from rich.console import Console

    join = None
    if arguments.join:
        from rollmesh_peer.mesh.join import JoinLine

        join = JoinLine.parse(arguments.join)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)

    async def show() -> None:
        async with _opened(join) as fetch:
            if not arguments.watch:
                _print(await fetch(), console, as_json=arguments.json)
            elif arguments.json or not console.is_terminal:
                await _watch_lines(fetch, console, as_json=arguments.json)
            else:
                await _watch_live(fetch, console)

    trio.run(_until_interrupted, show) if arguments.watch else trio.run(show)
    return 0


@contextlib.asynccontextmanager
async def _opened(join: JoinLine | None) -> AsyncIterator[Fetch]:
    from rollmesh_peer.status.client import collect, control_ask, find_local, remote_ask

    if join is None:

        async def local() -> Sequence[StatusAnswer]:
            return [await collect(control_ask(path)) for path in await find_local()]

        yield local
        return
    async with remote_ask(join) as ask:

        async def remote() -> Sequence[StatusAnswer]:
            return [await collect(ask)]

        yield remote


async def _until_interrupted(show: Callable[[], Awaitable[None]]) -> None:
    """Ctrl-C is the ordinary end of a watch."""
    import trio

    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:

            async def shown() -> None:
                await show()
                nursery.cancel_scope.cancel()

            nursery.start_soon(shown)
            async for _ in signals:
                nursery.cancel_scope.cancel()
                return


def _print(answers: Sequence[StatusAnswer], console: Console, *, as_json: bool) -> None:
    if as_json:
        for answer in answers:
            print(as_json_line(answer), flush=True)
    else:
        console.print(_shown(answers, width=console.width))


async def _watch_lines(fetch: Fetch, console: Console, *, as_json: bool) -> None:
    """One look after the other; a look that nobody answers is a line on its own."""
    import trio

    while True:
        try:
            _print(await fetch(), console, as_json=as_json)
        except LinkLost as error:
            if as_json:
                print(json.dumps({"error": error.detail}), flush=True)
            else:
                console.print(error.detail, style="yellow", markup=False)
        await trio.sleep(EVERY_S if as_json else PLAIN_EVERY_S)


async def _watch_live(fetch: Fetch, console: Console) -> None:
    """Draw over the last look. While nobody answers the last one stays, with a line that says so."""
    import trio
    from rich.live import Live

    answers: Sequence[StatusAnswer] = ()
    answered_at: float | None = None
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        while True:
            notice = ""
            try:
                answers = await fetch()
                answered_at = trio.current_time()
            except LinkLost as error:
                since = "" if answered_at is None else f" for {trio.current_time() - answered_at:.0f} s"
                notice = f"no answer{since}: {error.detail.splitlines()[0]}; it is tried again"
            live.update(_shown(answers, width=console.width, notice=notice), refresh=True)
            await trio.sleep(EVERY_S)


def _shown(answers: Sequence[StatusAnswer], *, width: int, notice: str = "") -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from rollmesh_peer.status.rendering import render

    parts: list[RenderableType] = [Text(notice, style="yellow")] if notice else []
    for answer in answers:
        if parts:
            parts.append(Text())
        parts.append(render(answer, width=width))
    return Group(*parts)


def as_json_line(answer: StatusAnswer) -> str:
    """``answer`` as one JSON object: digests in hex, everything else under the names of the protocol."""
    return json.dumps(_plain(answer.model_dump()), ensure_ascii=False)


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
