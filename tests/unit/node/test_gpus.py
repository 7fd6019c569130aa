"""GPUs: read from the driver's listing, chosen by the volunteer, shared out among engines by a pure plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_node.engine.memory_plan import Need
from rollmesh_node.gpu_plan import share_out
from rollmesh_node.gpus import Gpu, find_gpus, read_gpus, usable_gpus
from rollmesh_protocol.errors import HostError, UsageError
from rollmesh_protocol.limits import GIB

LISTING = """\
0, GPU-aa11, NVIDIA GeForce RTX 4090, 24564, 23000, 8.9
1, GPU-bb22, NVIDIA GeForce GTX 1060, 6144, 6000, 6.1
2, GPU-cc33, NVIDIA H200, 143771, 143000, 9.0
3, GPU-dd44, NVIDIA Odd, [N/A], [N/A], 9.0
No devices were found
"""


def gpu(index: int, gigabytes: float, name: str = "card") -> Gpu:
    return Gpu(
        index=index, uuid=f"GPU-{index}", name=name, memory_bytes=int(gigabytes * GIB), free_bytes=0, capability=(9, 0)
    )


def need_for(total_gb: float, *, run_gb: float = 1.0):
    def need(parts: int) -> Need:
        return Need(
            weights_bytes=int(total_gb * GIB / parts),
            runtime_bytes=int(run_gb * GIB),
            row_bytes=1,
            usual_row_bytes=1,
            columns=1,
        )

    return need


def test_a_listing_is_read_and_what_tells_nothing_is_left_out() -> None:
    gpus = read_gpus(LISTING)
    assert [gpu.index for gpu in gpus] == [0, 1, 2]
    assert gpus[0].memory_bytes == 24564 * 1024 * 1024 and gpus[0].capability == (8, 9)
    assert gpus[2].name == "NVIDIA H200"


def test_a_driver_that_fails_shows_no_gpu(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpus() == ()
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    program.chmod(0o700)
    assert find_gpus() == ()
    program.write_text(f"#!/bin/sh\necho '{LISTING.splitlines()[0]}'\n")
    assert [gpu.name for gpu in find_gpus()] == ["NVIDIA GeForce RTX 4090"]


def test_what_the_process_sees_and_what_the_owner_chose() -> None:
    gpus = read_gpus(LISTING)
    assert usable_gpus(gpus, chosen=(), visible=None) == gpus
    assert [one.index for one in usable_gpus(gpus, chosen=(2, 0, 2), visible=None)] == [2, 0]
    assert [one.index for one in usable_gpus(gpus, chosen=(), visible="1, GPU-cc")] == [1, 2]
    assert usable_gpus(gpus, chosen=(), visible="") == ()
    with pytest.raises(UsageError, match="names GPU 0, and this machine shows 2"):
        usable_gpus(gpus, chosen=(0,), visible="2")


def test_one_engine_per_gpu_where_the_model_fits_one() -> None:
    plan = share_out([gpu(0, 24), gpu(1, 24), gpu(2, 8)], need=need_for(16), heads=32, can_split=True)
    assert plan.engines == ((0,), (1,))
    assert "2 engines" in plan.why and "GPU 2 left out" in plan.why


def test_gpus_share_a_model_that_fits_none_of_them() -> None:
    gpus = [gpu(0, 24), gpu(1, 24), gpu(2, 24), gpu(3, 24), gpu(4, 24)]
    assert share_out(gpus, need=need_for(40), heads=32, can_split=True).engines == ((0, 1), (2, 3))
    assert share_out(gpus, need=need_for(60), heads=32, can_split=True).engines == ((0, 1, 2, 3),)
    mixed = [gpu(0, 24), gpu(1, 48, "big"), gpu(2, 24), gpu(3, 48, "big")]
    assert share_out(mixed, need=need_for(40), heads=32, can_split=True).engines == ((1,), (3,))
    assert share_out(mixed, need=need_for(60), heads=32, can_split=True).engines == ((1, 3),)


def test_what_fits_no_way_is_refused_with_the_numbers() -> None:
    gpus = [gpu(0, 24), gpu(1, 24)]
    with pytest.raises(HostError, match=r"60.0 GB for the weights.*GPU 0 has 24.0 GB, GPU 1 has 24.0 GB"):
        share_out(gpus, need=need_for(60), heads=32, can_split=True)
    with pytest.raises(HostError, match="1 GPU"):  # transformers cannot share
        share_out(gpus, need=need_for(40), heads=32, can_split=False)
    with pytest.raises(HostError, match="9 heads"):
        share_out(gpus, need=need_for(40), heads=9, can_split=True)


def test_the_owner_may_force_the_sharing() -> None:
    gpus = [gpu(0, 24), gpu(1, 24), gpu(2, 24)]
    assert share_out(gpus, need=need_for(1), heads=32, can_split=True, forced=2).engines == ((0, 1),)
    with pytest.raises(HostError):
        share_out(gpus, need=need_for(40), heads=32, can_split=True, forced=1)


@given(
    sizes=st.lists(st.sampled_from([8, 24, 48, 80]), max_size=12),
    model_gb=st.floats(0.5, 400),
    share=st.floats(0.3, 1),
)
def test_no_gpu_is_in_two_engines_and_each_holds_its_part(sizes: list[int], model_gb: float, share: float) -> None:
    gpus = [gpu(index, size, name=f"{size} GB") for index, size in enumerate(sizes)]
    need = need_for(model_gb)
    try:
        plan = share_out(gpus, need=need, heads=32, can_split=True, share=share)
    except HostError:
        return
    used = [index for engine in plan.engines for index in engine]
    assert len(used) == len(set(used)) > 0
    for engine in plan.engines:
        least = need(len(engine))
        names = {gpus[index].name for index in engine}
        assert len(names) == 1
        assert all(
            gpus[index].memory_bytes * share >= least.weights_bytes + least.runtime_bytes + 1 for index in engine
        )
