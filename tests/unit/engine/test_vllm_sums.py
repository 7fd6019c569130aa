"""The reload check of the vLLM backend: fused, tied and split parameters add up, and nothing else passes."""

from __future__ import annotations

import pytest

from rollmesh_node.engine.vllm_sums import EMBEDDING, HEAD, Held, ParameterSums, check
from rollmesh_protocol.errors import ChildFailed

FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
IMAGE = {
    EMBEDDING: ParameterSums(elements=100, sums=(11, 2**64 - 1)),
    "model.layers.0.self_attn.q_proj.weight": ParameterSums(elements=8, sums=(2**64 - 5, 1)),
    "model.layers.0.self_attn.k_proj.weight": ParameterSums(elements=4, sums=(7, 2)),
    "model.layers.0.self_attn.v_proj.weight": ParameterSums(elements=4, sums=(1, 3)),
    "model.norm.weight": ParameterSums(elements=10, sums=(9, 9)),
}
QKV = "model.layers.0.self_attn.qkv_proj.weight"


def worker(*, expected=IMAGE, **changed):
    found = {
        EMBEDDING: ParameterSums(elements=128, sums=(11, 2**64 - 1)),  # padded with zeros
        HEAD: ParameterSums(elements=128, sums=(11, 2**64 - 1)),  # tied: not in the image
        QKV: ParameterSums(elements=16, sums=(3, 6)),
        "model.norm.weight": ParameterSums(elements=10, sums=(9, 9)),
    }
    found.update({name.replace("__", "."): entry for name, entry in changed.items()})
    return Held(expected=expected, found=found, fused=FUSED, image_s=0.0, check_s=0.0)


def failing(*workers):
    with pytest.raises(ChildFailed) as failure:
        check(workers, names=list(IMAGE))
    assert failure.value.code == "child.weights"
    return str(failure.value)


def test_fused_padded_and_tied_parameters_pass():
    check([worker()], names=list(IMAGE))


def test_one_stale_parameter_is_named():
    held = worker()
    stale = Held(**{**vars(held), "found": {**held.found, QKV: ParameterSums(elements=16, sums=(3, 7))}})
    assert QKV in failing(stale)


def test_a_stale_head_is_found_even_where_it_is_tied():
    held = worker()
    stale = Held(**{**vars(held), "found": {**held.found, HEAD: ParameterSums(elements=128, sums=(12, 0))}})
    assert HEAD in failing(stale)


def test_a_parameter_that_no_tensor_fills_is_found():
    held = worker()
    stranger = Held(**{**vars(held), "found": {**held.found, "model.extra.weight": ParameterSums(1, (0, 0))}})
    assert "model.extra.weight is in no tensor" in failing(stranger)


def test_a_missing_parameter_is_found():
    held = worker()
    found = {name: entry for name, entry in held.found.items() if name != "model.norm.weight"}
    assert "model.norm.weight is not among" in failing(Held(**{**vars(held), "found": found}))


def test_an_image_that_was_not_read_to_its_end_is_found():
    assert "was not read to its end" in failing(worker(expected={EMBEDDING: IMAGE[EMBEDDING]}))


def test_split_parameters_add_up_over_workers_and_whole_ones_must_be_right_in_each():
    def part(embedding, qkv, norm):
        held = worker()
        found = {
            EMBEDDING: ParameterSums(64, embedding), HEAD: ParameterSums(64, embedding), QKV: ParameterSums(8, qkv),
            "model.norm.weight": ParameterSums(10, norm),
        }  # fmt: skip
        return Held(**{**vars(held), "found": found})

    left, right = part((5, 2**63), (1, 2), (9, 9)), part((6, 2**63 - 1), (2, 4), (9, 9))
    check([left, right], names=list(IMAGE))
    assert QKV in failing(left, part((6, 2**63 - 1), (2, 5), (9, 9)))
    assert "model.norm" in failing(left, part((6, 2**63 - 1), (2, 4), (9, 8)))


def test_what_a_worker_tells_survives_the_pipe():
    held = worker()
    assert Held.decode(held.encode()) == held


def test_stacked_experts_are_compared_as_one():
    name = "model.layers.0.mlp.experts."
    expected = {f"{name}{i}.{part}.weight": ParameterSums(4, (i, 2 * i)) for i in range(3) for part in ("up", "down")}
    found = {f"{name}w13_weight": ParameterSums(12, (3, 6)), f"{name}w2_weight": ParameterSums(12, (3, 6))}
    check([Held(expected=expected, found=found, fused={}, image_s=0.0, check_s=0.0)], names=list(expected))
    found[f"{name}w2_weight"] = ParameterSums(12, (3, 5))
    with pytest.raises(ChildFailed, match="mlp.experts does not hold"):
        check([Held(expected=expected, found=found, fused={}, image_s=0.0, check_s=0.0)], names=list(expected))
