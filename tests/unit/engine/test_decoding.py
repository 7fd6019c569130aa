"""The continuous decode against the plainest one: each token recomputed alone, drawn with the numpy reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

from rollmesh_node.engine import decoding, prefill
from rollmesh_node.engine.backend import Stats
from rollmesh_node.engine.decoding import Decoder
from rollmesh_node.engine.kv_cache import RowCache
from rollmesh_node.engine.passes import Passes
from rollmesh_peer.models.architecture import MODEL_TYPES
from rollmesh_peer.models.margins import Claim, recompute
from tests.unit.engine.requests import group, random_groups, with_begun
from tests.unit.models.tiny import naive_generate, naive_logprobs, random_model

STOP = [65, 70, 80, 90, 100, 110, 120, 30]
PLENTY = 1 << 40


def decoder_of(model, *, max_rows=64, cells=PLENTY):
    return Decoder(Passes(model), max_rows=max_rows, cells=lambda _held: cells, stats=Stats())


def decode(decoder, *adds, gap=3):
    """Add the first requests at once, the next ones after ``gap`` passes each; return all rollouts as they come."""
    rollouts, passes, left = [], 0, list(adds)
    while left or decoder.in_flight:
        if left and passes >= gap * (len(adds) - len(left)):
            decoder.add(left.pop(0))
        rollouts += decoder.advance()
        passes += 1
    return rollouts


def check(model, decoder, *adds, gap=3):
    """Compare every rollout with the naive one."""
    groups = {request.key: request for added in adds for request in added}
    rollouts = decode(decoder, *adds, gap=gap)
    places = [(rollout.key, rollout.index) for rollout in rollouts]
    assert sorted(places) == sorted((g.key, s.index) for g in groups.values() for s in g.samples)
    for rollout in rollouts:
        request = groups[rollout.key]
        sample = request.samples[rollout.index]
        begun = sample.begun.tolist()
        expected = naive_generate(
            model, request.prompt, seed=sample.seed, max_new_tokens=request.max_new_tokens, stop=request.stop
        )
        assert [*begun, *rollout.tokens.tolist()] == expected
        exact = naive_logprobs(model, [request.prompt], [np.array(expected)])[len(begun) :]
        torch.testing.assert_close(torch.from_numpy(rollout.logprobs), exact, atol=3e-4, rtol=0)
    assert decoder.in_flight == 0
    assert decoder._cache.num_bytes == 0
    return rollouts


def numbered(requests, *, first):
    return [replace(request, key=request.key + first) for request in requests]


@pytest.mark.parametrize("shared", [0, 15, 16, 20])
def test_prompts_of_many_lengths_with_a_common_beginning(tiny, shared):
    requests = random_groups(1, prompts=[21, 40, 33, 22], samples=3, stop=STOP, shared=shared)
    check(tiny.fp32, decoder_of(tiny.fp32), requests)


def test_equal_prompts_in_two_groups(tiny):
    first, second = random_groups(2, prompts=[30, 30], samples=2, shared=0)
    twin = group(1, first.prompt.tolist(), seeds=[s.seed for s in second.samples])
    check(tiny.fp32, decoder_of(tiny.fp32), [first, twin])


def test_one_prompt_that_begins_another(tiny):
    prompt = list(range(40, 80))
    requests = [group(0, prompt, seeds=[1, 2]), group(1, prompt[:20], seeds=[3, 4]), group(2, prompt[:1], seeds=[5])]
    check(tiny.fp32, decoder_of(tiny.fp32), requests)


def test_a_prompt_of_one_token(tiny):
    check(tiny.fp32, decoder_of(tiny.fp32), [group(0, [7], seeds=[1, 2, 3])])


@pytest.mark.parametrize("max_rows", [1, 2, 5, 16])
def test_rows_join_a_running_decode(tiny, max_rows):
    first = random_groups(3, prompts=[18, 25], samples=4, max_new_tokens=12, stop=STOP, shared=16)
    late = numbered(random_groups(4, prompts=[30, 3], samples=3, max_new_tokens=9, stop=STOP), first=10)
    last = numbered(random_groups(3, prompts=[40], samples=2, max_new_tokens=5, shared=16), first=20)
    check(tiny.fp32, decoder_of(tiny.fp32, max_rows=max_rows), first, late, last)


def test_very_long_rows_beside_very_short_ones(tiny):
    long = random_groups(5, prompts=[700], samples=2, max_new_tokens=6)
    short = [group(1, [7], seeds=[1, 2, 3], max_new_tokens=12), group(2, [9, 9], seeds=[4], max_new_tokens=2)]
    check(tiny.fp32, decoder_of(tiny.fp32, max_rows=4), [*long, *short])


def test_rows_go_on_behind_what_had_begun(tiny):
    plain = random_groups(6, prompts=[20, 31, 3], samples=3, max_new_tokens=14, shared=0)
    drawn = {(rollout.key, rollout.index): rollout.tokens for rollout in decode(decoder_of(tiny.fp32), plain)}
    counts = [[0, 5, 13], [2, 2, 0], [1, 12, 7]]
    begun = [
        with_begun(request, [drawn[request.key, index][:count] for index, count in enumerate(kept)])
        for request, kept in zip(plain, counts, strict=True)
    ]
    check(tiny.fp32, decoder_of(tiny.fp32, max_rows=4), begun[:2], begun[2:])


def test_gaps_are_filled_by_rows_that_wait_and_then_by_rows_from_the_end(tiny, monkeypatch):
    moves = []
    original = RowCache.copy

    def spy(cache, pairs, *, columns, source=None):
        if source is None:
            moves.append(len(pairs))
        original(cache, pairs, columns=columns, source=source)

    monkeypatch.setattr(RowCache, "copy", spy)
    requests = random_groups(7, prompts=[18, 25, 19], samples=8, max_new_tokens=24, stop=range(60))
    decoder = decoder_of(tiny.fp32, max_rows=10)
    widths = []
    widen = decoder._widen
    monkeypatch.setattr(
        decoder, "_widen", lambda *args, **more: (widths.append(len(decoder._rows)), widen(*args, **more))
    )
    check(tiny.fp32, decoder, requests)
    assert max(widths) == 10
    assert widths[-1] < 5
    assert sum(moves) >= 2


def test_a_rollout_comes_with_the_call_that_ends_it(tiny):
    decoder = decoder_of(tiny.fp32)
    requests = random_groups(4, prompts=[10, 10], samples=6, max_new_tokens=20, stop=range(60))
    lengths = [len(rollout.tokens) for rollout in decode(decoder, requests)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_completions_longer_than_the_first_room(tiny, monkeypatch):
    monkeypatch.setattr(decoding, "FIRST_COLUMNS", 3)
    requests = random_groups(5, prompts=[12, 5], samples=2, max_new_tokens=30)
    check(tiny.fp32, decoder_of(tiny.fp32, max_rows=3), requests)


@pytest.mark.parametrize("tokens", [1, 10, 100])
def test_a_prefill_in_pieces(tiny, monkeypatch, tokens):
    monkeypatch.setitem(prefill.PIECE_TOKENS, "cpu", tokens)
    requests = random_groups(6, prompts=[33, 20, 25], samples=2, shared=17)
    check(tiny.fp32, decoder_of(tiny.fp32), requests[:1], requests[1:], gap=12)


def test_a_mask_that_is_too_large_makes_pieces_as_well(tiny, monkeypatch):
    monkeypatch.setattr(prefill, "MASK_ELEMENTS", 200)
    check(tiny.fp32, decoder_of(tiny.fp32), random_groups(6, prompts=[33, 20, 25], samples=2))


def test_no_query_sees_nothing_or_a_later_token(tiny, monkeypatch):
    """Kernels differ in what they make of a row of -inf; padding must not depend on it."""
    masks = []
    model = tiny.fp32
    decoder = decoder_of(model, max_rows=4)
    original = model.base_model.forward

    def spy(**given):
        masks.append((given["attention_mask"], given["position_ids"]))
        return original(**given)

    monkeypatch.setattr(model.base_model, "forward", spy)
    decode(decoder, random_groups(9, prompts=[4, 20, 11], samples=2))
    assert len(masks) > 10
    for mask, positions in masks:
        seen = (mask == 0).sum(-1)
        assert torch.equal(seen[:, 0].expand(len(positions), -1), positions + 1)


def test_what_is_known_is_not_computed_again(tiny):
    decoder = decoder_of(tiny.fp32)
    decode(decoder, random_groups(7, prompts=[30, 32], samples=8, shared=20))
    stats = decoder._stats
    assert stats.prompt_tokens == 20 + 10 + 12
    assert (stats.steps, stats.tokens, stats.rollouts) == (9, 160, 16)


def test_a_group_that_joins_in_parts_is_computed_once(tiny):
    decoder = decoder_of(tiny.fp32, max_rows=4)
    check(tiny.fp32, decoder, [group(0, range(50), seeds=range(9), max_new_tokens=30, stop=range(40))])
    assert 50 < decoder._stats.prompt_tokens <= 50 + 5


@pytest.mark.parametrize("first_columns", [2, 128])
def test_memory_bounds_rows_times_columns(tiny, monkeypatch, first_columns):
    monkeypatch.setattr(decoding, "FIRST_COLUMNS", first_columns)
    decoder = decoder_of(tiny.fp32, cells=100)
    sizes = []
    for turn in range(8):
        decoder.add(numbered(random_groups(turn, prompts=[15, 40, 5], samples=2, stop=range(30)), first=10 * turn))
        while decoder.in_flight > 2:
            decoder.advance()
            sizes.append((decoder._cache.rows * decoder._cache.columns, len(decoder._live())))
    assert max(cells for cells, _ in sizes) <= 100
    assert max(rows for _, rows in sizes) == 4  # two of 15 tokens beside two of 25


def test_the_cache_stays_small_over_a_long_stream(tiny):
    """A long row makes it wide; it becomes narrow again while short ones keep coming, and nothing piles up."""
    decoder = decoder_of(tiny.fp32, max_rows=4)
    (long,) = random_groups(1, prompts=[400], samples=1, max_new_tokens=4)
    decoder.add([replace(long, key=0)])
    widths = []
    for turn in range(1, 60):
        decoder.add([group(turn, range(turn, turn + 5), seeds=[turn, 0], max_new_tokens=7)])
        for _ in range(4):
            decoder.advance()
            widths.append(decoder._cache.columns)
    assert max(widths) >= 400
    assert max(widths[40:]) <= 2 * 12
    assert decoder._cache.rows <= 4


def test_dropped_rows_tell_how_far_they_came_and_can_go_on(tiny):
    requests = random_groups(3, prompts=[20, 9], samples=3, max_new_tokens=12)
    decoder = decoder_of(tiny.fp32, max_rows=4)
    decoder.add(requests)
    for _ in range(6):  # a prefill that draws, and five steps
        assert decoder.advance() == []
    partials = {(partial.key, partial.index): partial for partial in decoder.drop()}
    assert sorted(partials) == [(key, index) for key in range(2) for index in range(3)]
    assert sorted(len(partial.tokens) for partial in partials.values()) == [0, 0, 6, 6, 6, 6]
    assert all(len(partial.tokens) == len(partial.logprobs) for partial in partials.values())
    assert decoder.in_flight == 0
    assert decoder._cache.num_bytes == 0
    assert decoder.advance() == []
    again = [
        with_begun(request, [partials[request.key, sample.index].tokens for sample in request.samples])
        for request in requests
    ]
    check(tiny.fp32, decoder, again)


def test_a_drop_in_the_middle_of_a_prefill_leaves_nothing(tiny, monkeypatch):
    monkeypatch.setitem(prefill.PIECE_TOKENS, "cpu", 4)
    decoder = decoder_of(tiny.fp32)
    decoder.add(random_groups(3, prompts=[20, 9], samples=3, max_new_tokens=12))
    decoder.advance()
    assert [len(partial.tokens) for partial in decoder.drop()] == [0] * 6
    check(tiny.fp32, decoder, random_groups(4, prompts=[12], samples=2))


def test_where_the_compiler_fails_the_same_is_computed_without_it(tiny, monkeypatch):
    def fail(model, **_options):
        def forward(**given):
            model(**given)  # it wrote to the cache before it failed
            raise TorchDynamoException("no C++ compiler")

        return forward

    monkeypatch.setattr(torch, "compile", fail)
    passes = Passes(tiny.fp32, compile=True)
    decoder = Decoder(passes, max_rows=4, cells=lambda _held: PLENTY, stats=Stats())
    check(tiny.fp32, decoder, random_groups(1, prompts=[20, 3], samples=2))
    assert passes.compiled == "failed: no C++ compiler"


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_type_is_decoded(model_type):
    model = random_model(model_type)
    requests = [group(key, range(key + 3, 30 + 2 * key), seeds=[1, 2], max_new_tokens=6) for key in range(3)]
    check(model, decoder_of(model, max_rows=3), requests[:2], requests[2:])


def test_bf16_passes_the_audit_however_rows_came(tiny):
    """Rows that join late, that go on, that move, and a long one: their margins are those of any honest engine."""
    first = random_groups(8, prompts=[20, 31, 300], samples=4, max_new_tokens=16, stop=STOP, shared=16)
    late = numbered(random_groups(9, prompts=[26, 3], samples=6, max_new_tokens=20, stop=STOP), first=10)
    base = numbered(random_groups(11, prompts=[22], samples=4, max_new_tokens=20), first=20)
    half = {rollout.index: rollout.tokens[:9] for rollout in decode(decoder_of(tiny.bf16), base)}
    on = [with_begun(base[0], [half[index] for index in range(4)])]
    rollouts = decode(decoder_of(tiny.bf16, max_rows=7), first, late, on)
    groups = {request.key: request for request in (*first, *late, *on)}
    claims, starts = [], []
    for rollout in rollouts:
        sample = groups[rollout.key].samples[rollout.index]
        whole = np.concatenate([sample.begun, rollout.tokens])
        claims.append(Claim(prompt=groups[rollout.key].prompt, completion=whole, seed=sample.seed))
        starts.append(len(sample.begun))
    found = recompute(tiny.bf16, claims)
    margins = np.concatenate([one.margins for one in found])
    assert len(rollouts) == 12 + 12 + 4
    assert (margins == 0).mean() > 0.9
    assert margins.max() < 0.5
    exact = np.concatenate([one.logprobs[start:] for one, start in zip(found, starts, strict=True)])
    assert np.median(np.abs(exact - np.concatenate([rollout.logprobs for rollout in rollouts]))) < 0.05
