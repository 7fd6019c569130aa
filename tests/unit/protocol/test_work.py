"""Leases, results, staleness, bitmaps, edges and manifests: the pure rules of the protocol."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_protocol.chunks import from_bitmap, to_bitmap
from rollmesh_protocol.edges import cheapest_path
from rollmesh_protocol.envelope import seal
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.layout import Layout, TensorSpec
from rollmesh_protocol.lease import seed_of, token_ids
from rollmesh_protocol.manifest import Edge, Manifest, manifest_name, open_manifest
from rollmesh_protocol.rollout import Result, check_result
from rollmesh_protocol.staleness import age, group_budget, is_admissible
from tests.unit.protocol.examples import CARD, LAYOUT, LEARNER, LEASE, MANIFEST, NODE, OTHER_ROOT, RESULT, ROOT, RUN

STOPS = frozenset({9})


# --- results ---------------------------------------------------------------------------------------------------------
def _changed(sample: int, **fields: object) -> Result:
    samples = [s.model_dump() for s in RESULT.samples]
    samples[sample] |= fields
    return Result.read(RESULT.model_dump() | {"samples": tuple(samples)})


def _floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def test_a_good_result_gives_one_rollout_a_sample() -> None:
    rollouts = check_result(RESULT, LEASE, vocabulary=10, stop_tokens=STOPS)
    assert [(r.index, r.seed, r.tokens.tolist(), r.finish) for r in rollouts] == [
        (0, 2**64 - 1, [5, 9], "stop"),
        (3, 5, [5, 5, 5, 5], "length"),
    ]


@pytest.mark.parametrize(
    ("code", "sample", "fields"),
    [
        ("result.samples", 0, {"index": 1}),
        ("result.samples", 0, {"index": 3}),
        ("result.length", 0, {"tokens": b"", "logprobs": b""}),
        ("result.length", 1, {"tokens": b"\x05\x00\x00\x00" * 5, "logprobs": _floats(*[-1] * 5)}),
        ("result.schema", 0, {"tokens": b"\x05\x00\x00\x00"}),
        ("result.schema", 0, {"tokens": b"\x05\x00\x00"}),
        ("result.tokens", 0, {"tokens": b"\x0a\x00\x00\x00\x09\x00\x00\x00"}),
        ("result.tokens", 0, {"tokens": b"\xff\xff\xff\xff\x09\x00\x00\x00"}),
        ("result.logprob", 0, {"logprobs": _floats(-1, float("nan"))}),
        ("result.logprob", 0, {"logprobs": _floats(-1, float("-inf"))}),
        ("result.logprob", 0, {"logprobs": _floats(-1, 0.01)}),
        ("result.finish", 0, {"finish": "length"}),
        ("result.finish", 1, {"finish": "stop"}),
        ("result.finish", 0, {"tokens": b"\x09\x00\x00\x00\x09\x00\x00\x00"}),
        ("result.finish", 1, {"tokens": b"\x05\x00\x00\x00", "logprobs": _floats(-1)}),
        ("result.root", 0, {"segments": ({"first_token": 0, "root": OTHER_ROOT},)}),
        ("result.root", 0, {"segments": ({"first_token": 1, "root": ROOT},)}),
        ("result.root", 0, {"segments": ({"first_token": 0, "root": ROOT}, {"first_token": 1, "root": OTHER_ROOT})}),
    ],
)
def test_a_wrong_result_is_refused_with_its_code(code: str, sample: int, fields: dict[str, object]) -> None:
    with pytest.raises(Refused) as caught:
        check_result(_changed(sample, **fields), LEASE, vocabulary=10, stop_tokens=STOPS)
    assert caught.value.code == code


def test_a_missing_sample_is_refused() -> None:
    result = Result.read(RESULT.model_dump() | {"samples": (RESULT.samples[0].model_dump(),)})
    with pytest.raises(Refused) as caught:
        check_result(result, LEASE, vocabulary=10, stop_tokens=STOPS)
    assert caught.value.code == "result.samples"


def test_seeds_differ_by_everything_that_names_a_sample() -> None:
    key = bytes(32)
    seeds = {
        seed_of(key, run=run, group=group, sample=sample) for run in "ab" for group in range(50) for sample in range(50)
    }
    assert len(seeds) == 5000
    assert seed_of(key, run="a", group=1, sample=2) == seed_of(key, run="a", group=1, sample=2)
    assert seed_of(bytes([1]) * 32, run="a", group=1, sample=2) not in seeds


def test_half_a_token_id_is_refused() -> None:
    with pytest.raises(Refused):
        token_ids(b"\x01\x00\x00")


# --- staleness -------------------------------------------------------------------------------------------------------
def test_age_counts_steps() -> None:
    assert age(consuming_step=5, weights_step=3) == 2
    assert is_admissible(consuming_step=5, weights_step=3, staleness=2)
    assert not is_admissible(consuming_step=5, weights_step=2, staleness=2)
    assert not is_admissible(consuming_step=5, weights_step=6, staleness=2)


@given(st.integers(0, 5), st.integers(0, 50), st.integers(0, 6), st.integers(1, 9), st.integers(0, 80))
def test_the_budget_never_orders_what_cannot_be_consumed(
    staleness: int, head: int, ahead: int, per_step: int, open_groups: int
) -> None:
    next_step = head + ahead
    budget = group_budget(
        head_step=head,
        next_step=next_step,
        staleness=staleness,
        groups_per_step=per_step,
        open_groups=open_groups,
    )
    assert budget >= 0
    if budget:
        last_step = next_step + (open_groups + budget - 1) // per_step
        assert is_admissible(consuming_step=last_step, weights_step=head, staleness=staleness)


# --- bitmaps ---------------------------------------------------------------------------------------------------------
@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_bitmaps_round_trip(case: tuple[int, set[int]]) -> None:
    count, held = case
    assert from_bitmap(to_bitmap(held, chunk_count=count), chunk_count=count) == held


@given(st.binary(max_size=20), st.integers(1, 100))
def test_a_bitmap_that_does_not_fit_is_refused(bitmap: bytes, count: int) -> None:
    try:
        held = from_bitmap(bitmap, chunk_count=count)
    except Refused:
        return
    assert len(bitmap) == -(-count // 8)
    assert all(0 <= index < count for index in held)


# --- layout, manifests and edges -------------------------------------------------------------------------------------
@given(
    st.lists(
        st.builds(
            TensorSpec,
            name=st.text("ab.", min_size=1, max_size=6),
            dtype=st.sampled_from(["bf16", "f16", "f32"]),
            shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_tensors_lie_in_order_aligned_and_apart(tensors: list[TensorSpec]) -> None:
    layout = Layout(tensors=tuple(tensors))
    end = 0
    for tensor, offset in zip(layout.tensors, layout.offsets, strict=True):
        assert offset % 64 == 0
        assert end <= offset < end + 64
        end = offset + tensor.tensor_bytes
    assert end <= layout.image_bytes < end + 64


def test_every_part_of_the_table_changes_the_root() -> None:
    digests = (ROOT, OTHER_ROOT, bytes(32))
    roots = {LAYOUT.root(digests)}
    for field, value in {"name": "other", "dtype": "f16", "shape": (3, 5)}.items():
        changed = LAYOUT.tensors[0].model_dump() | {field: value}
        roots.add(Layout(tensors=(TensorSpec.read(changed), *LAYOUT.tensors[1:])).root(digests))
    roots.add(LAYOUT.root((OTHER_ROOT, ROOT, bytes(32))))
    assert len(roots) == 5


def _sealed(**fields: object) -> bytes:
    manifest = Manifest.read(MANIFEST.model_dump() | fields)
    return seal(manifest.encode(), run=RUN, kind="manifest", identity=LEARNER).encode()


def test_a_manifest_is_known_by_its_name_and_its_signer() -> None:
    sealed = _sealed()
    opened = open_manifest(sealed, name=manifest_name(sealed), run=RUN, learner=LEARNER.peer, layout=LAYOUT)
    assert opened == MANIFEST
    assert [opened.chunk_length(i) for i in range(opened.chunk_count)] == [4096, 904]
    for code, arguments in {
        "manifest.invalid": {"name": bytes(32)},
        "envelope.run": {"run": "other"},
        "envelope.key": {"learner": NODE.peer},
        "manifest.run": {"layout": Layout(tensors=LAYOUT.tensors[:2])},
    }.items():
        with pytest.raises(Refused) as caught:
            open_manifest(
                sealed,
                **({"name": manifest_name(sealed), "run": RUN, "learner": LEARNER.peer, "layout": LAYOUT} | arguments),  # type: ignore[arg-type]
            )
        assert caught.value.code == code


def test_a_root_that_does_not_follow_from_the_tensors_is_refused() -> None:
    sealed = _sealed(root=ROOT)
    with pytest.raises(Refused) as caught:
        open_manifest(sealed, name=manifest_name(sealed), run=RUN, learner=LEARNER.peer, layout=LAYOUT)
    assert caught.value.code == "manifest.invalid"


@pytest.mark.parametrize(
    "fields",
    [
        {"chunks": ROOT},
        {"payload_bytes": 50_000},
        {"parent": None},
        {"kind": "anchor"},
        {"codec": "raw"},
        {"tensors": ROOT[:31]},
        {"chunk_bytes": 1},
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(Refused):
        Manifest.read(MANIFEST.model_dump() | fields)


def _edge(parent: int | None, root: int, cost: int) -> Edge:
    return Edge(
        kind="anchor" if parent is None else "patch",
        version=root + 1,
        step=root,
        parent=None if parent is None else bytes([parent]) * 32,
        root=bytes([root]) * 32,
        manifest=bytes([cost % 256]) * 32,
        manifest_bytes=1,
        payload_bytes=cost,
    )


def test_the_cheapest_way_wins() -> None:
    edges = [_edge(0, 1, 10), _edge(1, 2, 10), _edge(2, 3, 10), _edge(0, 3, 25), _edge(None, 3, 100), _edge(1, 3, 9)]

    def cost(held: int | None) -> int:
        path = cheapest_path(edges, held=None if held is None else bytes([held]) * 32, goal=bytes([3]) * 32)
        assert path is not None
        return sum(edge.payload_bytes for edge in path)

    assert cost(0) == 19
    assert cost(2) == 10
    assert cost(3) == 0
    assert cost(9) == 100
    assert cost(None) == 100


def test_no_way_is_told_from_no_need() -> None:
    assert cheapest_path([], held=ROOT, goal=ROOT) == ()
    assert cheapest_path([_edge(0, 1, 1)], held=None, goal=bytes([1]) * 32) is None


@given(
    st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 5)), st.integers(0, 5), st.integers(1, 50)), max_size=14),
    st.one_of(st.none(), st.integers(0, 5)),
)
def test_paths_lead_from_what_is_held_to_the_goal(triples: list[tuple[int | None, int, int]], held: int | None) -> None:
    edges = [_edge(parent, root, cost) for parent, root, cost in triples]
    at = None if held is None else bytes([held]) * 32
    goal = bytes([5]) * 32
    path = cheapest_path(edges, held=at, goal=goal)
    if path:
        for edge in path:
            assert edge.parent in (at, None)
            at = edge.root
        assert at == goal


def test_the_card_survives_its_own_encoding() -> None:
    assert type(CARD).decode(CARD.encode(), limit=1 << 20) == CARD
