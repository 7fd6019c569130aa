"""Every bound on what a peer may send or hold, with its unit and its reason. Both sides obey the same table.

Nothing is read, allocated or kept beyond these. A bound that an operator or a volunteer may lower is a config field
whose default is taken from here.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

# --- one message -----------------------------------------------------------------------------------------------------
FRAME_HEADER_BYTES: Final = 4
"""A frame is a big-endian uint32 length and that many bytes."""
WRITE_PIECE_BYTES: Final = 65_524
"""A stream is written in pieces of one Noise frame, so that cancelling between pieces never tears a frame."""
MAX_NESTING: Final = 12
"""Levels of arrays and maps; our deepest message has 6."""
MAX_ARRAY: Final = 65_536
"""Elements of one array or map, before the models set tighter bounds."""

HELLO_BYTES: Final = 64 * KIB
CARD_BYTES: Final = 4 * MIB
"""A run card carries the layout: about 60 bytes a tensor, and the largest models have some 30,000."""
LEASE_REQUEST_BYTES: Final = 16 * KIB
LEASES_BYTES: Final = 4 * MIB
"""16 groups of 32k prompt tokens at 4 bytes come to 2 MiB."""
RESULT_BYTES: Final = 8 * MIB
"""64 samples of 8,192 tokens at 8 bytes come to 4 MiB."""
RECEIPT_BYTES: Final = 16 * KIB
SMALL_BYTES: Final = 16 * KIB
"""Requests that name things: returns, edges, peers, manifests, status."""
EDGES_BYTES: Final = 256 * KIB
PEERS_BYTES: Final = 64 * KIB
MANIFEST_BYTES: Final = 8 * MIB
"""A manifest has 36 bytes a chunk and 32 bytes a tensor."""
HAVE_BYTES: Final = 64 * KIB
"""A bitmap of 262,144 chunks is 32 KiB."""
STATUS_BYTES: Final = 1 * MIB
GOSSIP_BYTES: Final = 64 * KIB
"""A gossip message; larger ones end gossip from that peer silently in the library."""
GOSSIP_RPC_BYTES: Final = 1 * MIB
CHILD_FRAME_BYTES: Final = 256 * MIB
"""A frame between a daemon and its own child process: a batch of rollouts, never weights."""

# --- what a message may ask for --------------------------------------------------------------------------------------
MAX_GROUPS_PER_REQUEST: Final = 16
MAX_SAMPLES_PER_GROUP: Final = 256
MAX_PROMPT_TOKENS: Final = 32_768
MAX_NEW_TOKENS: Final = 32_768
MAX_VOCABULARY: Final = 1 << 20
MAX_STOP_TOKENS: Final = 32
MAX_NEIGHBOURS: Final = 16
MAX_EDGES: Final = 256
MAX_TENSORS: Final = 65_536
MAX_TENSOR_NAME_CHARS: Final = 256
MAX_TENSOR_DIMS: Final = 8
MAX_CHUNKS: Final = 262_144
MIN_CHUNK_BYTES: Final = 4 * KIB
MAX_CHUNK_BYTES: Final = 1 * MIB
PATCH_CHUNK_BYTES: Final = 256 * KIB
"""Small enough that a patch of a few MB is spread over peers."""
ANCHOR_CHUNK_BYTES: Final = 1 * MIB
MAX_CHUNKS_PER_REQUEST: Final = 8
MAX_MODEL_BYTES: Final = 512 * GIB
MAX_TEXT_CHARS: Final = 1024
"""A sentence in a message: a refusal's detail, what a peer waits for."""
MAX_MODEL_CONFIG_BYTES: Final = 64 * KIB
MAX_LEASE_S: Final = 3600.0
LOGPROB_SLACK: Final = 0.001
"""A log-probability may exceed zero by this much of rounding."""

# --- connections -----------------------------------------------------------------------------------------------------
MAX_CONNECTIONS: Final = 64
"""Low, because home routers fail with hundreds of connections."""
MAX_LEARNER_CONNECTIONS: Final = 2048
MAX_STREAMS_PER_PEER: Final = 32
"""Streams that one peer may hold open towards us at a time."""
MAX_REQUESTS_PER_S: Final = 50.0
"""Requests a second of one peer, averaged; chunk requests included."""
REQUEST_BURST: Final = 200
MAX_BUFFERED_BYTES: Final = 5 * MIB
"""Unread bytes of one connection; yamux itself does not enforce its window."""
MAX_HANDSHAKES: Final = 64
"""Connections being negotiated at one time."""
MAX_CONNECTIONS_PER_BLOCK: Final = 32
"""Connections of one /24 (IPv4) or /48 (IPv6); loopback is not counted."""
SERVED_FILE_RATIO: Final = 1.5
"""Chunks served to one peer for one manifest, as a multiple of the whole payload."""
PASS_VERSIONS: Final = 10_000
"""Policy versions after which a pass that admits a node to other peers is refused."""

# --- time (seconds) --------------------------------------------------------------------------------------------------
DIAL_S: Final = 10.0
REQUEST_S: Final = 20.0
"""One small request and its answer."""
TRANSFER_S: Final = 120.0
"""One large frame, such as a result or a run card."""
CHUNK_S: Final = 5.0
"""Least deadline of a chunk request; the larger of this and four times the median is used."""
HEARTBEAT_S: Final = 3.0
DEAD_AFTER_S: Final = 15.0
"""Silence after which a node counts as gone and its leases are given to others."""
BACKOFF_FIRST_S: Final = 0.25
BACKOFF_MOST_S: Final = 30.0
STATUS_EVERY_S: Final = 1.0
"""A status is built at most this often."""
GOSSIP_PER_TOPIC_S: Final = 10
"""Gossip messages a second and topic that are looked at; the rest of a flood is dropped."""

# --- disk ------------------------------------------------------------------------------------------------------------
DEFAULT_DISK_BYTES: Final = 100 * GIB
DEFAULT_DOWNLOAD_BYTES: Final = 100 * GIB
FREE_DISK_BYTES: Final = 512 * MIB
"""Room that is always left on a disk we write to."""
