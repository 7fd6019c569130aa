"""The bound of the design: everybody has a payload within 1.25 T* + 1 s, and within twice T* whatever goes wrong."""

from __future__ import annotations

import pytest

from tests.unit.swarm.pace import HARMS, Scene, measure


@pytest.mark.parametrize("nodes", [4, 16])
def test_a_payload_spreads_almost_as_fast_as_the_links_allow(tmp_path, monkeypatch, nodes):
    scene = Scene(nodes=nodes)
    outcome = measure(scene, tmp_path, monkeypatch)
    assert len(outcome.times) == nodes
    assert outcome.last_s <= 1.25 * scene.bound_s + 1.0
    assert outcome.wasted <= 0.1


@pytest.mark.parametrize("harm", ["killed", "corrupt", "hidden"])
def test_what_goes_wrong_costs_less_than_as_much_again(tmp_path, monkeypatch, harm):
    scene = Scene(nodes=8, **HARMS[harm])
    outcome = measure(scene, tmp_path, monkeypatch)
    assert len(outcome.times) == (6 if harm == "killed" else 8)
    assert outcome.last_s <= 2 * scene.bound_s
