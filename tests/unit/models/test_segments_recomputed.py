"""Rollouts of several segments through the recomputing children of both sides, without their processes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from rollmesh_learner.audit.cases import Case
from rollmesh_learner.audit.pieces import by_root, joined
from rollmesh_learner.audit.process import Process
from rollmesh_learner.work.groups import StoredRollout, Stretch
from rollmesh_node.engine.recheck import Rechecker
from rollmesh_node.selfcheck.pieces import pieces_of
from rollmesh_peer.models.base import write_base_image
from rollmesh_peer.models.folder import ModelFolder
from rollmesh_peer.testing.tiny_model import VOCABULARY, prepare_tiny
from rollmesh_protocol.layout import Layout
from rollmesh_protocol.lease import Lease, LeasedSample
from rollmesh_protocol.rollout import Rollout, check_result
from tests.support.pen import Part, Pen

LENGTH = 300
ROOTS = [bytes([number]) * 32 for number in (1, 2, 3)]


@dataclass(frozen=True)
class Shelf:
    """Three versions of the tiny model, which have nothing in common but their layout."""

    images: dict[bytes, Path]
    opening: dict[str, object]
    pen: Pen


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    place = tmp_path_factory.mktemp("versions")
    images: dict[bytes, Path] = {}
    for seed, root in enumerate(ROOTS):
        images[root] = place / f"{seed}.image"
        layout: Layout = write_base_image(prepare_tiny(place / f"{seed}", seed=seed), image=images[root])
    config = dict(ModelFolder.open(place / "0").config)
    opening = {"config_json": json.dumps(config), "layout": layout.encode(), "threads": 1, "device": "cpu"}
    return Shelf(images, opening, Pen(config, layout))


def drawn(shelf: Shelf, *parts: tuple[int, int, int]) -> tuple[Rollout, ...]:
    """The rollouts of a lease of version 1; parts are (first token, drawn under, named), by number of version."""
    lease = Lease(
        lease_id=bytes(16), node="n", group=0, samples=tuple(LeasedSample(index=i, seed=100 + i) for i in range(3)),
        version=1, step=0, root=ROOTS[0], prompt=np.arange(40, 60, dtype="<u4").tobytes(), max_new_tokens=LENGTH,
        temperature=1.0, duration_s=1.0, swap_mode="recompute",
    )  # fmt: skip
    chosen = [Part(first, shelf.images[ROOTS[under - 1]], ROOTS[named - 1]) for first, under, named in parts]
    result = shelf.pen.answer(lease, chosen, stop=frozenset())
    swaps = list(enumerate(ROOTS[1:], 2))
    return check_result(result, lease, vocabulary=VOCABULARY, stop_tokens=frozenset(), swaps=swaps)


def as_case(rollout: Rollout) -> Case:
    oldest, *later = (
        Stretch(segment.first_token, ROOTS.index(segment.root) + 1, 0, segment.root) for segment in rollout.segments
    )
    stored = StoredRollout(
        rollout.lease.lease_id, rollout.index, 0, "n", oldest.version, oldest.step, oldest.root, rollout.seed,
        rollout.tokens.tobytes(), rollout.logprobs.tobytes(), rollout.finish, True, later=tuple(later),
    )  # fmt: skip
    return Case(stored, rollout.lease.prompt)


def audited(shelf: Shelf, rollouts: tuple[Rollout, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Margins and exact log-probabilities of each, as the learner's auditor puts them together."""
    process = Process()
    process.open(shelf.opening)
    cases = [as_case(rollout) for rollout in rollouts]
    found: dict[int, list] = {case.rollout.sample: [] for case in cases}
    for root, pieces in by_root(cases).items():
        body = {"image": str(shelf.images[root]), "rollouts": [piece.body(n) for n, piece in enumerate(pieces)]}
        for piece, outcome in zip(pieces, process.audit(body)["rollouts"], strict=True):
            found[piece.case.rollout.sample].append(outcome)
    wholes = [joined(outcomes) for outcomes in found.values()]
    return [(np.frombuffer(w["margins"], "<f4"), np.frombuffer(w["exact_logprobs"], "<f4")) for w in wholes]


def test_honest_segments_pass_and_their_exact_log_probabilities_are_those_of_each(shelf: Shelf) -> None:
    rollouts = drawn(shelf, (0, 1, 1), (128, 2, 2), (256, 3, 3))
    for rollout, (margins, exact) in zip(rollouts, audited(shelf, rollouts), strict=True):
        assert len(margins) == len(exact) == LENGTH
        assert margins.max() < 0.5 and (margins == 0).mean() > 0.9
        assert np.abs(exact - rollout.logprobs).max() < 0.5


@pytest.mark.parametrize(
    ("parts", "wrong"),
    [
        ([(0, 1, 1), (128, 1, 2)], slice(128, LENGTH)),
        ([(0, 2, 1), (128, 2, 2)], slice(0, 128)),
        ([(0, 1, 1), (128, 2, 2), (256, 2, 3)], slice(256, LENGTH)),
    ],
)
def test_a_segment_drawn_under_other_weights_than_it_names_shows_there_and_nowhere_else(
    shelf: Shelf, parts: list[tuple[int, int, int]], wrong: slice
) -> None:
    rollouts = drawn(shelf, *parts)
    for margins, _ in audited(shelf, rollouts):
        assert (margins[wrong] > 1).mean() > 0.3
        assert np.delete(margins, wrong).max() < 0.5


def test_a_node_finds_the_same_of_its_own_work(shelf: Shelf) -> None:
    rollouts = drawn(shelf, (0, 1, 1), (128, 2, 2))
    child = Rechecker()
    child.open(shelf.opening)
    found: dict[int, list[np.ndarray]] = {rollout.index: [] for rollout in rollouts}
    for root in ROOTS[:2]:
        child.load({"image": str(shelf.images[root])})
        for rollout in rollouts:
            for piece in (piece for piece in pieces_of(rollout) if piece.root == root):
                body = {
                    "prompt": piece.prompt, "tokens": piece.tokens.tobytes(), "seed": piece.seed, "first": piece.first,
                }  # fmt: skip
                (outcome,) = child.recheck({"rollouts": [body]})["rollouts"]
                found[rollout.index].append(np.frombuffer(outcome["margins"], "<f4"))
    for (margins, _), pieces in zip(audited(shelf, rollouts), found.values(), strict=True):
        assert [len(piece) for piece in pieces] == [128, LENGTH - 128]
        assert np.abs(np.concatenate(pieces) - margins).max() < 0.1


def test_the_pieces_of_a_rollout_end_where_it_ends(shelf: Shelf) -> None:
    rollout = drawn(shelf, (0, 1, 1), (256, 3, 3))[0]
    first, second = pieces_of(rollout)
    assert (first.first, second.first, second.root) == (0, 256, ROOTS[2])
    assert second.prompt == rollout.lease.prompt + rollout.tokens[:256].tobytes()
    assert np.concatenate([first.tokens, second.tokens]).tolist() == rollout.tokens.tolist()
