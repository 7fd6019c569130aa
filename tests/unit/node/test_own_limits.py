"""A hostile learner: what a node refuses of a card and of a lease, with which code and which numbers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rollmesh_node.own_limits import OwnLimits, check_card, check_memory, open_lease
from rollmesh_protocol import limits
from rollmesh_protocol.errors import HostError, Refused
from rollmesh_protocol.layout import Layout, TensorSpec
from tests.unit.node.cards import NODE, STRANGER, make_card, seal_lease
from tests.unit.node.leases import make_lease

OWN = OwnLimits(prompt_tokens=128, new_tokens=64, disk_bytes=limits.GIB, download_bytes=limits.GIB)


def test_an_ordinary_card_passes() -> None:
    check_card(make_card(), OWN)


@pytest.mark.parametrize(
    ("card", "words"),
    [
        (make_card(prompt_tokens=129), ("129 tokens in a prompt", "128", "limits.prompt_tokens")),
        (make_card(new_tokens=32_768), ("32,768 tokens in a completion", "64", "limits.completion_tokens")),
        (
            make_card(layout=Layout(tensors=(TensorSpec(name="w", dtype="f32", shape=(1 << 20, 1 << 10)),))),
            ("4.00 GiB of weights", "1.00 GiB", "limits.download_gb"),
        ),
    ],
)
def test_a_card_beyond_the_limits_is_refused_with_both_numbers(card, words) -> None:
    with pytest.raises(Refused) as caught:
        check_card(card, OWN)
    assert caught.value.code == "card.limits"
    for word in words:
        assert word in caught.value.detail


@pytest.mark.parametrize(
    "config",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"[" * 50_000,
        json.dumps({"auto_map": {"AutoModel": "evil.Model"}}).encode(),
        json.dumps({"text_config": {"auto_map": {}}}).encode(),
        json.dumps({"parts": [{"trust_remote_code": True}]}).encode(),
        json.dumps({"quantization_config": {"quant_method": "x"}}).encode(),
    ],
)
def test_a_model_that_brings_code_or_is_no_model_is_refused(config: bytes) -> None:
    with pytest.raises(Refused) as caught:
        check_card(make_card(config=config), OWN)
    assert caught.value.code == "card.model"


def test_a_stop_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(Refused, match="stop token"):
        check_card(make_card(stop_tokens=(100,)), OWN)


def test_a_model_beyond_the_memory_is_refused_with_the_numbers() -> None:
    check_memory(make_card(), free_bytes=10, needed_bytes=10)
    with pytest.raises(HostError, match=r"16\.00 GiB of memory .* 8\.00 GiB are free"):
        check_memory(make_card(), free_bytes=8 * limits.GIB, needed_bytes=16 * limits.GIB)


def test_an_honest_lease_opens() -> None:
    lease = make_lease(node=NODE.peer)
    assert open_lease(seal_lease(lease), card=make_card(), node=NODE.peer, own=OWN) == lease


def _refusal(sealed: bytes, own: OwnLimits = OWN) -> str:
    with pytest.raises(Refused) as caught:
        open_lease(sealed, card=make_card(), node=NODE.peer, own=own)
    return caught.value.code


def test_a_lease_that_is_not_the_learners_word_is_refused() -> None:
    lease = make_lease(node=NODE.peer)
    good = seal_lease(lease)
    assert _refusal(seal_lease(lease, by=STRANGER)) == "envelope.key"
    assert _refusal(seal_lease(lease, run="another")) == "envelope.run"
    assert _refusal(seal_lease(lease, kind="result")) == "envelope.kind"
    assert _refusal(good[:-1] + bytes([good[-1] ^ 1])) == "envelope.signature"
    assert _refusal(good.replace(lease.prompt, b"\x09\0\0\0" * 3)) == "envelope.signature"
    assert _refusal(b"") == "request.invalid"
    assert _refusal(b"\0" * 1000) == "request.invalid"


def test_a_lease_of_another_node_is_refused() -> None:
    assert _refusal(seal_lease(make_lease(node=STRANGER.peer))) == "lease.other_node"


def test_a_lease_beyond_what_was_agreed_is_refused() -> None:
    assert _refusal(seal_lease(make_lease(node=NODE.peer, prompt_tokens=65))) == "lease.limits"
    assert _refusal(seal_lease(make_lease(node=NODE.peer, max_new_tokens=33))) == "lease.limits"
    assert _refusal(seal_lease(make_lease(node=NODE.peer, samples=9))) == "lease.limits"
    assert _refusal(seal_lease(make_lease(node=NODE.peer, swap_mode="recompute"))) == "lease.limits"
    both = make_card(swap_modes=("drain", "recompute"))
    lease = make_lease(node=NODE.peer, swap_mode="recompute")
    assert open_lease(seal_lease(lease), card=both, node=NODE.peer, own=OWN) == lease
    ours = replace(OWN, prompt_tokens=2)
    assert _refusal(seal_lease(make_lease(node=NODE.peer, prompt_tokens=3)), ours) == "lease.limits"


@pytest.mark.parametrize("duration_s", [0.0, -1.0, 3600.1, 1e300])
def test_an_absurd_duration_is_refused(duration_s: float) -> None:
    lease = make_lease(node=NODE.peer)
    body = lease.model_copy(update={"duration_s": duration_s})
    assert _refusal(seal_lease(body)) == "request.invalid"


def test_a_lease_with_nonsense_inside_is_refused() -> None:
    lease = make_lease(node=NODE.peer)
    twice = lease.model_copy(update={"samples": (lease.samples[0], lease.samples[0])})
    assert _refusal(seal_lease(twice)) == "request.invalid"
    beyond = lease.model_copy(update={"prompt": (100).to_bytes(4, "little")})
    assert _refusal(seal_lease(beyond)) == "request.invalid"
    assert _refusal(seal_lease(lease.model_copy(update={"duration_s": 0.5}))) == "lease.limits"
    torn = lease.model_copy(update={"prompt": b"\1\0\0\0\1"})
    assert _refusal(seal_lease(torn)) == "request.invalid"
