"""A session over the tiny model: what a step does and does not do, and checkpoints that others can load."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollmesh_learner.training import checkpoint
from rollmesh_learner.training.batch import RolloutRecord, Sample
from rollmesh_learner.training.loss import Objective, Tokens, policy_loss
from rollmesh_learner.training.session import Session
from rollmesh_peer.models.folder import ModelFolder
from rollmesh_peer.models.image import weights_of
from rollmesh_peer.models.loader import load_model
from rollmesh_peer.models.logprobs import completion_logprobs
from rollmesh_peer.testing.tiny_model import prepare_tiny
from rollmesh_protocol.errors import ChildFailed, HostError
from tests.unit.training.models import open_session
from tests.unit.training.samples import random_samples, record, sample


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_tiny(tmp_path_factory.mktemp("tiny"))


def rewarded(seed: int = 0) -> list[Sample]:
    """Three groups: mixed rewards, mixed rewards, and one that carries no gradient."""
    samples = random_samples(seed, groups=3, size=4)
    rewards = [1, 0, 0, 1, 0, 0, 1, 0, 1, 1, 1, 1]
    return [
        sample(s.prompt.tolist(), s.tokens.tolist(), group=s.group, reward=r)
        for s, r in zip(samples, rewards, strict=True)
    ]


def records(samples: Sequence[Sample], logprobs: np.ndarray | None = None) -> list[RolloutRecord]:
    ends = np.cumsum([len(s.tokens) for s in samples])[:-1]
    claims = [None] * len(samples) if logprobs is None else np.split(logprobs, ends)
    return [record(s, mu=mu, number=n) for n, (s, mu) in enumerate(zip(samples, claims, strict=True))]


def own_logprobs(session: Session, samples: Sequence[Sample]) -> Tensor:
    """What everybody else computes for the present weights: the shared loader's function on an exported image."""
    return completion_logprobs(session._model, [s.prompt for s in samples], [s.tokens for s in samples])


def bits(session: Session) -> dict[str, Tensor]:
    everything = dict(session.weights()) | {f"m.{n}": t for n, t in session.masters().items()} | dict(session.moments())
    return {name: tensor.detach().clone() for name, tensor in everything.items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_opened_it_holds_the_folders_weights(folder: Path) -> None:
    session = open_session(folder)
    saved = load_file(folder / "model.safetensors")
    assert session.step == 0
    assert session.vocabulary == 260
    assert session.num_parameters == sum(t.numel() for t in saved.values())
    assert [t.name for t in session.layout.tensors] == sorted(saved)
    for name, tensor in session.weights().items():
        assert torch.equal(tensor, saved[name])
        assert torch.equal(session.masters()[name], saved[name].float())


def test_the_gradient_is_that_of_the_objective(folder: Path) -> None:
    """Against the plain way: one padded pass, autograd through the whole loss, bfloat16 noise apart."""
    samples = rewarded()
    session = open_session(folder, max_gradient_norm=1e9)
    own = own_logprobs(session, samples)
    lengths = [len(s.tokens) for s in samples]
    deviation = np.sqrt(0.25) + 1e-6
    third = np.sqrt(3 / 16) + 1e-6
    advantage = np.repeat(
        [0.5 / deviation, -0.5 / deviation, -0.5 / deviation, 0.5 / deviation]
        + [-0.25 / third, -0.25 / third, 0.75 / third, -0.25 / third]
        + [0.0] * 4,
        lengths,
    )
    mu = own.detach() - 0.1
    loss = policy_loss(
        own,
        pi_old=own.detach(),
        tokens=Tokens(
            mu=mu, exact=torch.zeros(len(mu), dtype=torch.bool), advantage=torch.from_numpy(advantage).float()
        ),
        objective=Objective(clip_low=0.2, clip_high=0.2, importance_cap=2, delta=0.4, kl=0, normaliser=96),
    )
    parameters = dict(session._model.named_parameters())
    names = list(session.masters())
    expected = torch.autograd.grad(loss, [parameters[name] for name in names])

    report = session.train(records(samples, mu.numpy()), step=0)
    assert report.updated
    assert report.metrics["loss"] == pytest.approx(float(loss.detach()), rel=0.02, abs=1e-4)
    moments = session.moments()
    found = torch.cat([moments[f"{name}.exp_avg"].flatten() / 0.1 for name in names])
    wanted = torch.cat([gradient.flatten().float() for gradient in expected])
    assert float(torch.cosine_similarity(found, wanted, dim=0)) > 0.999
    assert float(found.norm() / wanted.norm()) == pytest.approx(1.0, rel=0.02)
    assert report.metrics["gradient_norm"] == pytest.approx(float(found.norm()), rel=1e-3)


def test_every_rollout_is_checked_with_or_without_gradient(folder: Path) -> None:
    samples = rewarded()
    session = open_session(folder)
    claims = own_logprobs(session, samples).detach().numpy().copy()
    ends = np.cumsum([len(s.tokens) for s in samples])
    claims[ends[0] : ends[1]] -= 0.5  # the second sample deflates
    claims[ends[-2] :] = 0.0  # the last one, which carries no gradient, claims certainty
    asked = records(samples, claims)
    report = session.train(asked, step=0)
    assert [name for name, _ in report.mismatches] == [r.id for r in asked]
    assert [n for n, (_, found) in enumerate(report.mismatches) if found.verdict == "audit"] == [1, 11]
    honest = [found for n, (_, found) in enumerate(report.mismatches) if n not in {1, 11}]
    assert max(found.median for found in honest) < 0.05


def test_a_step_tells_how_far_it_moved_the_policy(folder: Path) -> None:
    """On the sample that it looks at: one of twelve."""
    samples = rewarded()
    session = open_session(folder, lr=3e-3)
    before = own_logprobs(session, samples).detach()
    report = session.train(records(samples, before.numpy()), step=0)
    first = slice(0, len(samples[0].tokens))
    moved = (own_logprobs(session, samples).detach() - before)[first].double()
    assert report.metrics["kl_update"] == pytest.approx(float(moved.square().mean() / 2), rel=0.2, abs=1e-4)
    assert report.metrics["kl_update"] > 1e-3
    assert report.metrics["figures_not_finite"] == 0
    small = open_session(folder, lr=1e-6).train(records(samples, before.numpy()), step=0)
    assert small.metrics["kl_update"] < report.metrics["kl_update"] / 10


def test_an_update_that_ruins_the_weights_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient was finite; what came of it is not."""
    session = open_session(folder)
    step = session._optimiser.step

    def ruin() -> float:
        norm = step()
        with torch.no_grad():
            session._model.get_parameter("model.norm.weight").fill_(float("nan"))
        return norm

    monkeypatch.setattr(session._optimiser, "step", ruin)
    report = session.train(records(rewarded()), step=0)
    assert report.updated
    assert "kl_update" not in report.metrics
    assert report.metrics["figures_not_finite"] == 1


def test_without_variance_nothing_moves(folder: Path) -> None:
    """Momentum of earlier steps included."""
    session = open_session(folder)
    session.train(records(rewarded()), step=0)
    before = bits(session)
    flat = [sample(s.prompt.tolist(), s.tokens.tolist(), group=s.group, reward=1.0) for s in rewarded(1)]
    report = session.train(records(flat), step=1)
    assert not report.updated
    assert report.metrics["updates"] == 0
    assert "gradient_norm" not in report.metrics
    assert "kl_update" not in report.metrics
    assert len(report.mismatches) == len(flat)
    assert same(before, bits(session))
    assert session.step == 2


def test_it_learns_what_is_rewarded(folder: Path) -> None:
    samples = rewarded()
    session = open_session(folder, lr=3e-3)
    before = own_logprobs(session, samples).detach()
    for step in range(15):
        claims = own_logprobs(session, samples).detach().numpy()
        session.train(records(samples, claims), step=step)
    after = own_logprobs(session, samples).detach()
    ends = np.cumsum([len(s.tokens) for s in samples])[:-1]
    change = [float(part.sum()) for part in np.split((after - before).numpy(), ends)]
    good = [c for c, s in zip(change[:8], samples[:8], strict=True) if s.reward]
    bad = [c for c, s in zip(change[:8], samples[:8], strict=True) if not s.reward]
    assert min(good) > max(bad)
    assert sum(good) > 0


@pytest.mark.parametrize("settings", [{"micro_batch_tokens": 16}, {"logits_bytes": 1024 * 1024}])
def test_bounds_on_memory_change_only_rounding(folder: Path, settings: dict[str, int]) -> None:
    one, other = open_session(folder), open_session(folder, **settings)
    asked = records(rewarded())
    whole, pieces = one.train(asked, step=0), other.train(asked, step=0)
    assert pieces.metrics["loss"] == pytest.approx(whole.metrics["loss"], abs=1e-3)
    left = torch.cat([t.flatten() for n, t in one.moments().items() if n.endswith("exp_avg")])
    right = torch.cat([t.flatten() for n, t in other.moments().items() if n.endswith("exp_avg")])
    assert float(torch.cosine_similarity(left, right, dim=0)) > 0.999


def test_several_updates_of_one_batch_stay_near_the_old_policy(folder: Path) -> None:
    samples = rewarded()
    session = open_session(folder, lr=5e-3, epochs=3, minibatches=2)
    claims = own_logprobs(session, samples).detach().numpy()
    report = session.train(records(samples, claims), step=0)
    assert report.metrics["updates"] == 6
    assert report.metrics["clip_fraction"] > 0
    assert report.metrics["kl_behaviour"] < 0.01  # of pi_old, from before the updates
    assert {found.verdict for _, found in report.mismatches} == {"ok"}


def test_the_kl_term_pulls_back_to_the_base(folder: Path) -> None:
    samples = rewarded()
    sessions = [open_session(folder, lr=3e-3, kl=kl) for kl in (0.0, 50.0)]
    base = own_logprobs(sessions[0], samples).detach()
    for session in sessions:
        for step in range(6):
            session.train(records(samples), step=step)
    free, held = (float((own_logprobs(s, samples).detach() - base).abs().mean()) for s in sessions)
    assert held < free / 2


def test_a_step_out_of_order_is_refused_and_changes_nothing(folder: Path) -> None:
    session = open_session(folder)
    session.train(records(rewarded()), step=0)
    before = bits(session)
    for wrong in (0, 2, 100):
        with pytest.raises(ChildFailed, match="at step 1") as caught:
            session.train(records(rewarded()), step=wrong)
        assert caught.value.code == "trainer.step"
    good = records(rewarded())
    broken = good[0].model_copy(update={"tokens": np.array([9999] * len(rewarded()[0].tokens), "<u4").tobytes()})
    with pytest.raises(ChildFailed, match="vocabulary"):
        session.train([*good, broken], step=1)
    assert same(before, bits(session))
    assert session.train(good, step=1).updated


def test_a_step_that_fails_half_way_ends_the_session(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(folder)

    def fail(samples: Sequence[Sample]) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(session._trainer, "train", fail)
    with pytest.raises(MemoryError):
        session.train(records(rewarded()), step=0)
    assert session.is_broken
    with pytest.raises(ChildFailed, match="half-way"):
        session.train(records(rewarded()), step=0)
    with pytest.raises(ChildFailed, match="half-way"):
        session.export(folder / "image")


def test_a_gradient_that_is_not_finite_is_not_used(folder: Path) -> None:
    session = open_session(folder)
    with torch.no_grad():
        session._model.get_parameter("model.norm.weight").fill_(1e38)
    before = bits(session)
    report = session.train(records(rewarded()), step=0)
    assert not report.updated
    assert report.metrics["updates_refused"] == 1
    json.dumps(report.metrics, allow_nan=False)
    after = bits(session)
    assert same(
        {n: t for n, t in before.items() if n.startswith("m.")}, {n: t for n, t in after.items() if n.startswith("m.")}
    )


def test_an_export_is_what_an_engine_loads(folder: Path, tmp_path: Path) -> None:
    session = open_session(folder)
    session.train(records(rewarded()), step=0)
    image = tmp_path / "weights" / "image"
    session.export(image)
    loaded = load_model(ModelFolder.open(folder).config, layout=session.layout, image=image)
    assert same(weights_of(loaded), {name: tensor.detach() for name, tensor in session.weights().items()})
    assert [file.name for file in image.parent.iterdir()] == ["image"]


def test_a_checkpoint_is_a_model_folder(folder: Path, tmp_path: Path) -> None:
    session = open_session(folder)
    session.train(records(rewarded()), step=0)
    saved = tmp_path / "checkpoints" / "step-00000001"
    session.checkpoint(saved, carry={"next_group": 17, "cursors": {"addition": [1, 2]}})
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert model.dtype == torch.bfloat16
    assert same(weights_of(model), {name: tensor.detach() for name, tensor in session.weights().items()})
    tokenizer = AutoTokenizer.from_pretrained(saved)
    assert tokenizer.encode("What is 1 + 1?") == AutoTokenizer.from_pretrained(folder).encode("What is 1 + 1?")
    state = json.loads((saved / "state.json").read_text())
    assert (state["step"], state["updates"]) == (1, 1)
    assert state["carry"] == {"next_group": 17, "cursors": {"addition": [1, 2]}}
    names = {file.name for file in saved.iterdir()}
    assert {"model.safetensors", "masters.safetensors", "optimiser.safetensors", "config.json"} <= names
    assert all(name.endswith((".safetensors", ".json", ".jinja")) for name in names)
    assert ModelFolder.open(saved).stop_tokens == ModelFolder.open(folder).stop_tokens
    assert open_session(saved).step == 0  # as a base model it is a beginning


def test_a_checkpoint_replaces_one_of_its_name_and_clears_left_overs(folder: Path, tmp_path: Path) -> None:
    session = open_session(folder)
    left_over = tmp_path / ".partial-step-00000007"
    left_over.mkdir()
    (left_over / "masters.safetensors").write_bytes(b"torn")
    saved = tmp_path / "step-00000000"
    session.checkpoint(saved, carry={"n": 1})
    session.checkpoint(saved, carry={"n": 2})
    assert checkpoint.load_state(saved).carry == {"n": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]


def test_an_interrupted_checkpoint_has_no_name(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(folder)

    def full_disk(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(HostError, match="No space left"):
        session.checkpoint(tmp_path / "step-00000000", carry={})
    monkeypatch.undo()
    assert not (tmp_path / "step-00000000").exists()
    session.checkpoint(tmp_path / "step-00000000", carry={})
    assert open_session(folder, checkpoint=tmp_path / "step-00000000").step == 0


def test_what_is_carried_must_be_plain(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ChildFailed, match="plain JSON"):
        open_session(folder).checkpoint(tmp_path / "step-00000000", carry={"a": b"bytes"})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["state", "masters", "moments", "shape"])
def test_a_damaged_checkpoint_is_refused_in_one_sentence(folder: Path, tmp_path: Path, damage: str) -> None:
    session = open_session(folder)
    session.train(records(rewarded()), step=0)
    saved = tmp_path / "step-00000001"
    session.checkpoint(saved, carry={})
    if damage == "state":
        (saved / "state.json").write_text('{"format": 1}')
    elif damage == "masters":
        (saved / "masters.safetensors").write_bytes((saved / "masters.safetensors").read_bytes()[:1000])
    elif damage == "moments":
        (saved / "optimiser.safetensors").unlink()
    else:
        (saved / "model.safetensors").write_bytes((saved / "masters.safetensors").read_bytes())
        (saved / "masters.safetensors").write_bytes((saved / "model.safetensors").read_bytes()[:8])
    with pytest.raises(ChildFailed):
        open_session(folder, checkpoint=saved)


def test_random_states_survive(folder: Path, tmp_path: Path) -> None:
    session = open_session(folder)
    session._generator.integers(0, 10, 5)
    torch.rand(3)
    session.checkpoint(tmp_path / "step-00000000", carry={})
    expected = session._generator.integers(0, 1000, 4).tolist(), torch.rand(4).tolist()
    again = open_session(folder, checkpoint=tmp_path / "step-00000000")
    assert (again._generator.integers(0, 1000, 4).tolist(), torch.rand(4).tolist()) == expected
