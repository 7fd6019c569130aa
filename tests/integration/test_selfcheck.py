"""A node's selfcheck with real children on the tiny model: honest work passes, and what is broken is named."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from rollmesh_node.config import Engine
from rollmesh_node.engine_setting import choose_engine
from rollmesh_node.introduction import CARD, run_place
from rollmesh_node.joining import pin_card
from rollmesh_node.journal import JOURNAL, Journal, read_journal, write_journal
from rollmesh_node.selfcheck import check as selfcheck_module
from rollmesh_node.selfcheck.check import Order, selfcheck
from rollmesh_node.selfcheck.fresh_work import fresh_leases, generate
from rollmesh_node.selfcheck.report import as_json, as_text
from rollmesh_peer.children.launch import python_argv
from rollmesh_peer.models.base import write_base_image
from rollmesh_peer.testing.fake_learner import make_anchor
from rollmesh_peer.testing.tiny_model import END_OF_TEXT, TURN_END, VOCABULARY, prepare_tiny
from rollmesh_peer.weights.edge_store import EdgeStore
from rollmesh_peer.weights.keeper import open_keeper
from rollmesh_peer.weights.workshop import open_workshop
from rollmesh_protocol import limits
from rollmesh_protocol.errors import HostError
from rollmesh_protocol.messages import Standing
from rollmesh_protocol.verdicts.drift import DriftTest
from rollmesh_protocol.verdicts.judging import Judging
from tests.unit.node.cards import LEARNER, RUN, make_card

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SETTING = choose_engine(Engine(backend="transformers", device="cpu", threads=1), environ=os.environ)
TOKENS = 400


def broken(how: str):
    environment = {**SETTING.spec.environment, "PYTHONPATH": str(ROOT)}
    argv = python_argv("tests.support.broken_engine", "--how", how)
    return replace(SETTING, spec=replace(SETTING.spec, argv=argv, environment=environment))


class Home:
    """A node's folder, as a daemon that was stopped leaves it."""

    def __init__(self, folder: Path, card, root: bytes) -> None:
        self.folder, self.card, self.root = folder, card, root

    @property
    def place(self) -> Path:
        return run_place(self.folder, learner=self.card.learner, run=self.card.run)

    async def work(self, setting=SETTING) -> None:
        """Leave results of this engine in the journal."""
        (self.folder / JOURNAL).unlink(missing_ok=True)
        image = next((self.place / "weights" / "snapshots").iterdir())
        leases = fresh_leases((), card=self.card, root=self.root, version=1)
        model = {
            "config_json": self.card.model.config.decode(), "layout": self.card.layout.encode(), "image": str(image)
        }  # fmt: skip
        work = await generate(setting, leases, model=model, stop=frozenset(self.card.stop_tokens), least_tokens=TOKENS)
        journal = Journal(self.folder / JOURNAL, run=self.card.run, learner=self.card.learner)
        for lease, result in work.results:
            journal.made(lease, result)
            journal.answered(lease.lease_id, accepted=len(result.samples))
        write_journal(self.folder / JOURNAL, journal.notes)

    def calibrate(self, judging: Judging) -> None:
        """As a node that was told so at its last hello."""
        pin_card(self.card.model_copy(update={"checks": judging.as_checks}), self.place / CARD)

    def order(self, setting=SETTING, **fields) -> Order:
        return Order(**{"folder": self.folder, "engine": setting, "ram_folder": None, "fresh_tokens": TOKENS} | fields)


async def make_home(folder: Path) -> Home:
    model = prepare_tiny(folder.parent / "model", seed=0)
    image = folder.parent / "image"
    layout = await trio.to_thread.run_sync(lambda: write_base_image(model, image=image))
    root = make_anchor(image.read_bytes(), run=RUN, layout=layout, version=1).root
    card = make_card(
        config=(model / "config.json").read_bytes(), layout=layout, base_root=root, vocabulary=VOCABULARY,
        stop_tokens=(END_OF_TEXT, TURN_END),
    )  # fmt: skip
    home = Home(folder, card, root)
    home.place.mkdir(parents=True, mode=0o700)
    (home.place / CARD).write_bytes(card.encode())
    store = EdgeStore(
        home.place / "edges", run=card.run, learner=card.learner, layout=layout, quota_bytes=64 * limits.MIB
    )
    async with open_workshop(layout) as workshop:
        keeping = open_keeper(home.place / "weights", ram_folder=None, layout=layout, store=store, workshop=workshop)
        async with keeping as keeper:
            await keeper.adopt_base(image, expected_root=root, version=1, step=1)
    return home


CALIBRATED = Judging(drift=DriftTest(clip=0.1, reference=0.0003, exponent=30.0))
"""As a calibration on another machine would find it for the tiny model."""


async def make_busy_home(folder: Path) -> Home:
    home = await make_home(folder)
    await home.work()
    return home


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A node that has worked honestly."""
    return trio.run(make_busy_home, tmp_path_factory.mktemp("selfcheck") / "node")


@pytest.fixture
def home(made, tmp_path) -> Home:
    shutil.copytree(made.folder, tmp_path / "node")
    return Home(tmp_path / "node", made.card, made.root)


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.blake2b(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


async def test_an_honest_node_is_told_so_and_nothing_is_changed(home: Home) -> None:
    before = contents(home.folder)
    report = await selfcheck(home.order())
    assert report.verdict == "fine", report
    for figures in (report.kept, report.fresh):
        assert figures is not None and figures.tokens >= TOKENS and figures.verdict == "pass"
        assert figures.exact_share > 0.9 and figures.low_share == 0 and figures.repeat_gap == 0
    assert report.versions == (1,) and report.device == "cpu" and report.notes == []
    assert contents(home.folder) == before
    text = as_text(report)
    assert "fine: what this node makes passes" in text and len(text.splitlines()) < 40
    assert "limits     defaults: the run has no calibration" in text
    told = json.loads(as_json(report))
    assert told["verdict"] == "fine" and told["kept"]["tokens"] == report.kept.tokens


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("temperature", "temperature", "about 0.7"),
        ("greedy", "greedy", ""),
        ("truncation", "truncation", "top-k of about 50"),
        ("seed", "seed", ""),
        ("weights", "weights", "log-probabilities off by"),
        ("shift", "shift", "-0.4"),
        ("not_finite", "not_finite", "result.logprob"),
        ("engine", "engine", "not finite"),
    ],
)
async def test_a_broken_engine_is_named_by_its_fresh_work(home: Home, how: str, kind: str, words: str) -> None:
    (home.folder / JOURNAL).unlink()
    report = await selfcheck(home.order(broken(how)))
    assert [finding.kind for finding in report.findings] == [kind], report
    assert words in report.findings[0].detail and report.verdict == "wrong"
    text = as_text(report)
    assert "something is wrong" in text and "  likely" in text and "  do" in text


async def test_an_honest_node_of_a_calibrated_run_is_told_by_its_limits(home: Home) -> None:
    home.calibrate(CALIBRATED)
    report = await selfcheck(home.order())
    assert report.verdict == "fine", report
    for figures in (report.kept, report.fresh):
        assert figures is not None and figures.drift is not None and figures.drift.score < figures.drift.alarm / 2
    text = as_text(report)
    assert "limits     this run's calibration" in text and "of honest nodes at most 0.0002" in text


async def test_a_drift_below_all_margins_is_found_where_the_run_looks_for_one(home: Home) -> None:
    await home.work(broken("coarse"))
    report = await selfcheck(home.order(broken("coarse")))
    assert report.verdict == "fine", report
    home.calibrate(CALIBRATED)
    report = await selfcheck(home.order(broken("coarse")))
    assert [finding.kind for finding in report.findings] == ["drift"], report
    assert "audited tokens the learner sees a drift" in report.findings[0].detail


async def test_old_work_of_an_engine_that_was_mended_is_told_apart(home: Home) -> None:
    await home.work(broken("weights"))
    report = await selfcheck(home.order())
    assert [finding.kind for finding in report.findings] == ["stale"], report
    assert report.fresh is not None and report.fresh.verdict == "pass"


async def test_results_that_were_altered_afterwards_are_not_right(home: Home) -> None:
    notes = read_journal(home.folder / JOURNAL)
    assert notes is not None
    entries = []
    for entry in notes.entries:
        samples = []
        for sample in entry.result.samples:
            tokens = bytearray(sample.tokens)
            tokens[0:4] = (7).to_bytes(4, "little")
            samples.append(sample.model_copy(update={"tokens": bytes(tokens)}))
        entries.append(entry.model_copy(update={"result": entry.result.model_copy(update={"samples": tuple(samples)})}))
    write_journal(home.folder / JOURNAL, notes.model_copy(update={"entries": tuple(entries)}))
    report = await selfcheck(home.order(fresh_tokens=0))
    assert report.verdict == "wrong" and report.fresh is None
    assert report.kept is not None and report.kept.verdict == "hard"


async def test_without_a_journal_the_engine_is_checked_with_made_up_prompts(home: Home) -> None:
    (home.folder / JOURNAL).unlink()
    home.calibrate(CALIBRATED)
    report = await selfcheck(home.order())
    assert report.verdict == "fine" and report.kept is None and report.fresh is not None
    assert report.fresh.drift is not None
    assert report.notes == ["this node has kept no results yet"]


async def test_a_damaged_journal_accuses_nobody(home: Home) -> None:
    path = home.folder / JOURNAL
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(bytes(raw))
    report = await selfcheck(home.order())
    assert report.verdict == "fine" and report.results == 0
    assert any("is damaged" in note for note in report.notes)


async def test_without_weights_the_forms_are_checked_and_the_reason_is_told(home: Home) -> None:
    shutil.rmtree(home.place / "weights")
    report = await selfcheck(home.order())
    assert report.verdict == "unchecked" and any("holds no weights" in note for note in report.notes)
    assert report.results > 1 and "nothing could be recomputed" in as_text(report)


async def test_results_of_other_weights_are_not_held_against_these(home: Home) -> None:
    path = home.folder / JOURNAL
    notes = read_journal(path)
    assert notes is not None
    entry = notes.entries[0]
    segments = (entry.result.samples[0].segments[0].model_copy(update={"root": b"\7" * 32}),)
    samples = tuple(sample.model_copy(update={"segments": segments}) for sample in entry.result.samples)
    other = entry.model_copy(
        update={
            "lease": entry.lease.model_copy(update={"root": b"\7" * 32}),
            "result": entry.result.model_copy(update={"samples": samples}),
        }
    )
    write_journal(path, notes.model_copy(update={"entries": (other,)}))
    report = await selfcheck(home.order(fresh_tokens=1))
    assert report.kept is None and report.fresh is not None
    assert any("no longer at hand" in note for note in report.notes)


async def test_too_little_memory_is_told_in_numbers(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck_module, "free_bytes", lambda: 100_000_000)
    report = await selfcheck(home.order())
    assert report.verdict == "unchecked"
    assert any("needs 0.81 GB" in note and "0.10 GB are free" in note for note in report.notes), report.notes


async def test_a_node_that_never_joined_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="not taken part in any run yet"):
        await selfcheck(Order(folder=tmp_path, engine=SETTING, ram_folder=None))


async def test_the_word_of_the_learner_is_shown(home: Home) -> None:
    path = home.folder / JOURNAL
    journal = Journal(path, run=RUN, learner=LEARNER.peer)
    lease_id = journal.notes.entries[0].lease.lease_id
    journal.answered(lease_id, code="result.sampling", detail="a token lies 4.0 below the sample that its seed gives")
    journal.regarded(Standing(state="quarantined", accepted=3, rejected=8, audited=1, reason="result.sampling"))
    write_journal(path, journal.notes)
    report = await selfcheck(home.order(fresh_tokens=0))
    assert report.verdict == "fine" and report.refusals == {"result.sampling": 1}
    text = as_text(report)
    assert "standing quarantined: result.sampling" in text and "1 x result.sampling: the tokens are not" in text
