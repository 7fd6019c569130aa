"""One example of every record that travels, made from fixed numbers, for the golden vectors."""

from __future__ import annotations

from rollmesh_protocol.envelope import seal
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.layout import Layout, TensorSpec
from rollmesh_protocol.lease import Lease, LeasedSample
from rollmesh_protocol.manifest import Edge, Manifest
from rollmesh_protocol.messages import (
    Checks,
    ChunkRequest,
    DriftCheck,
    EdgesAnswer,
    EdgesRequest,
    EngineInfo,
    HaveRequest,
    HaveUpdate,
    Head,
    Hello,
    LeaseAnswer,
    LeaseRequest,
    LogprobChecks,
    ManifestRequest,
    MarginChecks,
    ModelReference,
    Neighbour,
    Notice,
    Pass,
    PeersAnswer,
    PeersRequest,
    PolicyHeader,
    Receipt,
    ReturnAnswer,
    ReturnRequest,
    RunCard,
    RunLimits,
    Standing,
    Wait,
    Welcome,
)
from rollmesh_protocol.record import Record
from rollmesh_protocol.rollout import Result, SampleResult, Segment
from rollmesh_protocol.status import (
    LengthStatus,
    NodeStatus,
    PeerStatus,
    RunStatus,
    SpreadStatus,
    StatusAnswer,
    StatusRequest,
    TrustStatus,
)

LEARNER = Identity(bytes(range(32)))
NODE = Identity(bytes(range(32, 64)))
RUN = "example-0011223344556677"
ROOT, OTHER_ROOT, NAME = bytes([1]) * 32, bytes([2]) * 32, bytes([3]) * 32
LAYOUT = Layout(
    tensors=(
        TensorSpec(name="embed", dtype="bf16", shape=(5, 3)),
        TensorSpec(name="scale", dtype="f32", shape=()),
        TensorSpec(name="empty", dtype="f16", shape=(0, 4)),
    )
)
HEAD = Head(version=7, step=6, root=ROOT)
STANDING = Standing(state="probation", accepted=20, rejected=1, audited=12, reason="")
LEASE = Lease(
    lease_id=bytes(range(16)),
    node=NODE.peer,
    group=41,
    samples=(LeasedSample(index=0, seed=2**64 - 1), LeasedSample(index=3, seed=5)),
    version=7,
    step=6,
    root=ROOT,
    prompt=b"\x01\x00\x00\x00\x02\x00\x00\x00",
    max_new_tokens=4,
    temperature=1.0,
    duration_s=30.0,
    swap_mode="drain",
)
RESULT = Result(
    lease_id=LEASE.lease_id,
    samples=(
        SampleResult(
            index=0,
            tokens=b"\x05\x00\x00\x00\x09\x00\x00\x00",
            logprobs=b"\x00\x00\x80\xbf\x00\x00\x00\xc0",
            finish="stop",
            segments=(Segment(first_token=0, root=ROOT),),
        ),
        SampleResult(
            index=3,
            tokens=b"\x05\x00\x00\x00" * 4,
            logprobs=b"\x00\x00\x80\xbf" * 4,
            finish="length",
            segments=(Segment(first_token=0, root=ROOT),),
        ),
    ),
    engine="transformers 5.24.0 bf16 cpu",
    generate_s=0.5,
)
MANIFEST = Manifest(
    run=RUN,
    version=7,
    step=6,
    kind="patch",
    parent=OTHER_ROOT,
    root=LAYOUT.root((ROOT, OTHER_ROOT, NAME)),
    codec="context-1",
    layout=LAYOUT.digest,
    chunk_bytes=4096,
    payload_bytes=5000,
    chunks=ROOT + OTHER_ROOT,
    tensors=ROOT + OTHER_ROOT + NAME,
)
EDGE = Edge(
    kind="patch",
    version=7,
    step=6,
    parent=OTHER_ROOT,
    root=ROOT,
    manifest=NAME,
    manifest_bytes=900,
    payload_bytes=5000,
)
CARD = RunCard(
    run=RUN,
    name="example",
    learner=LEARNER.peer,
    model=ModelReference(source="hub:org/model", parameters=16, base_root=ROOT, config=b'{"model_type":"llama"}'),
    layout=LAYOUT,
    vocabulary=10,
    stop_tokens=(9,),
    tokenizer_digest=NAME,
    environments=("addition",),
    limits=RunLimits(prompt_tokens=64, new_tokens=4, samples_per_group=8),
    swap_modes=("drain",),
    checks=Checks(
        margins=MarginChecks(
            any_margin=2.5,
            high_margin=1.0,
            high_in_one=3,
            low_margin=0.625,
            window_tokens=200,
            high_share=0.01,
            low_share=0.01,
        ),
        drift=DriftCheck(clip=0.375, reference=0.0035, exponent=5.5, alarm=17.5),
        logprobs=LogprobChecks(median=0.1, kl=0.1, least_ratio=0.0001),
    ),
)
PEER_STATUS = PeerStatus(
    peer=NODE.peer,
    name="desk",
    role="worker",
    engine="transformers bf16 on cpu",
    connected=True,
    path="in",
    version=7,
    tokens_per_s=150.5,
    standing=STANDING,
    leased_samples=8,
    last_accepted_s=1.5,
    last_seen_s=0.5,
    waiting_for="",
    withheld="",
)
SEALED = seal(LEASE.encode(), run=RUN, kind="lease", identity=LEARNER)

EXAMPLES: dict[str, Record] = {
    "hello": Hello(
        majors=(1,),
        software="rollmesh/0.1.0",
        name="desk",
        role="worker",
        engine=EngineInfo(backend="transformers", dtype="bf16", device="cpu"),
        addresses=("/ip4/192.0.2.1/tcp/4701/p2p/" + NODE.peer,),
        invite=None,
    ),
    "welcome": Welcome(card=b"card", admission=b"pass", head=HEAD),
    "pass": Pass(peer=NODE.peer, issued_version=7),
    "card": CARD,
    "lease_request": LeaseRequest(groups=2, version_held=7, root_held=ROOT, tokens_per_s=150.5, waiting_for="work"),
    "lease_answer": LeaseAnswer(
        head=HEAD, leases=(SEALED.encode(),), wait=Wait(seconds=0.5, why="no work"), standing=STANDING
    ),
    "lease": LEASE,
    "lease_envelope": SEALED,
    "result": RESULT,
    "receipt": Receipt(lease_id=LEASE.lease_id, accepted=(0, 3), code=None, detail="", head=HEAD, standing=STANDING),
    "return_request": ReturnRequest(lease_ids=(LEASE.lease_id,), code="node.stopping"),
    "return_answer": ReturnAnswer(returned=1, head=HEAD),
    "manifest_request": ManifestRequest(name=NAME),
    "manifest": MANIFEST,
    "edges_request": EdgesRequest(root=None),
    "edges_answer": EdgesAnswer(head=HEAD, edges=(EDGE,)),
    "peers_request": PeersRequest(count=8),
    "peers_answer": PeersAnswer(
        peers=(Neighbour(peer=NODE.peer, addresses=("/ip4/192.0.2.1/tcp/4701/p2p/" + NODE.peer,)),), head=HEAD
    ),
    "have_request": HaveRequest(admission=b"pass", manifest=NAME, bitmap=b"\x01"),
    "have_update": HaveUpdate(bitmap=b"\x03"),
    "chunk_request": ChunkRequest(manifest=NAME, indices=(0, 1)),
    "policy_header": PolicyHeader(
        version=7, step=6, root=ROOT, parent=OTHER_ROOT, manifest=NAME, manifest_bytes=900, payload_bytes=5000
    ),
    "notice": Notice(sequence=3, kind="pause", text="moving house"),
    "status_request": StatusRequest(page=0),
    "status_answer_node": StatusAnswer(
        run=None,
        node=NodeStatus(
            peer=NODE.peer,
            name="desk",
            software="rollmesh/0.1.0",
            run=RUN,
            learner=LEARNER.peer,
            learner_connected=True,
            head=HEAD,
            version_held=7,
            root_held=ROOT,
            engine="transformers bf16 on cpu",
            tokens_per_s=150.5,
            leases_open=1,
            standing=STANDING,
            accepted=20,
            rejected=1,
            last_accepted_s=1.5,
            last_refusal="",
            bytes_from_learner=1000,
            bytes_from_peers=2000,
            chunks_from_learner=4,
            chunks_from_peers=8,
            bytes_served=3000,
            neighbours=1,
            waiting_for="",
            uptime_s=60.0,
        ),
    ),
    "status_answer_run": StatusAnswer(
        run=RunStatus(
            run=RUN,
            name="example",
            learner=LEARNER.peer,
            software="rollmesh/0.1.0",
            state="training step 6",
            head=HEAD,
            head_bytes=5900,
            model_bytes=269_000_000,
            spread=(
                SpreadStatus(
                    version=7,
                    head_bytes=5900,
                    age_s=5.0,
                    online=2,
                    holding=1,
                    most_s=None,
                    last_s=None,
                    bytes_from_learner=5900,
                    slowest=("node-b",),
                ),
            ),
            step=7,
            steps=40,
            mean_reward=0.25,
            groups_leased=4,
            groups_ready=2,
            rollouts_accepted=400,
            rollouts_rejected=1,
            audits_done=50,
            audits_failed=0,
            trust=TrustStatus(
                audits_waiting=2,
                audits_most=128,
                audited_tokens=3000,
                work_tokens=64000,
                steady_audited_tokens=1200,
                steady_work_tokens=40000,
                consumed_bad=1,
                consumed_bad_steps=(4,),
                reaudits_waiting=3,
                reaudits_missed=2,
                over_cap=0,
                lengths=(LengthStatus(tokens=8, consumed=300, dropped=4),),
            ),
            bubble_fraction=0.125,
            uptime_s=60.0,
            children=("trainer: running, pid 5",),
            peers=(PEER_STATUS,),
            page=0,
            pages=1,
        ),
        node=None,
    ),
}
