"""What may be arriving at one time, by peer and in all."""

from __future__ import annotations

import pytest

from rollmesh_peer.mesh.libp2p_host.streams import ReceivingBudget
from rollmesh_protocol import limits
from rollmesh_protocol.errors import Refused

FREE, MOST, ALL = limits.RECEIVING_BYTES_FREE, limits.RECEIVING_BYTES_PER_PEER, limits.RECEIVING_BYTES


def filled() -> tuple[ReceivingBudget, list[str]]:
    """A budget that peers have used up with messages whose end they hold back."""
    budget, peers = ReceivingBudget(), [f"peer-{number}" for number in range(ALL // MOST)]
    for peer in peers:
        budget.take(peer, MOST)
    return budget, peers


def test_one_peer_has_its_own_bound() -> None:
    budget = ReceivingBudget()
    budget.take("a", MOST)
    with pytest.raises(Refused, match="from this peer"):
        budget.take("a", 1)
    budget.take("b", MOST)


def test_what_others_hold_back_shuts_nobody_out_who_sends_little() -> None:
    budget, _ = filled()
    budget.take("honest", FREE)
    with pytest.raises(Refused, match="at once"):
        budget.take("honest", 1)
    with pytest.raises(Refused, match="at once"):
        budget.take("another", FREE + 1)


def test_what_is_given_back_may_be_taken_again() -> None:
    budget, peers = filled()
    budget.give_back(peers[0], MOST)
    budget.take("another", MOST)
    with pytest.raises(Refused):
        budget.take(peers[0], FREE + 1)
