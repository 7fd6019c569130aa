"""Collecting a status of many pages, from anybody."""

from __future__ import annotations

from rollmesh_peer.status.client import MAX_PAGES, collect
from rollmesh_protocol.status import StatusAnswer, StatusRequest
from tests.unit.status.samples import PEERS, node_status, peer, run_status


async def test_pages_become_one_answer_with_each_peer_once() -> None:
    pages = [[peer(1), peer(2)], [peer(2), peer(3)], [peer(4)]]

    async def ask(request: StatusRequest) -> StatusAnswer:
        run = run_status(*pages[request.page], page=request.page, pages=len(pages))
        return StatusAnswer(run=run, node=None)

    answer = await collect(ask)
    assert answer.run is not None
    assert [peer.peer for peer in answer.run.peers] == PEERS[1:5]
    assert (answer.run.page, answer.run.pages) == (0, 1)


async def test_a_learner_that_claims_endless_pages_is_asked_for_some() -> None:
    asked = []

    async def ask(request: StatusRequest) -> StatusAnswer:
        asked.append(request.page)
        return StatusAnswer(run=run_status(peer(1), page=request.page, pages=10**9), node=None)

    await collect(ask)
    assert asked == list(range(MAX_PAGES))


async def test_a_node_has_one_page() -> None:
    async def ask(request: StatusRequest) -> StatusAnswer:
        assert request.page == 0
        return StatusAnswer(run=None, node=node_status())

    assert (await collect(ask)).node == node_status()
