"""Every bound on what a peer may send or hold, with its unit and its reason. Both sides obey the same table.

Nothing is read, allocated or kept beyond these. A bound that an operator or a volunteer may lower is a config field
whose default is taken from here.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB
BYTES_PER_MBIT: Final = 125_000

# --- one message -----------------------------------------------------------------------------------------------------
FRAME_HEADER_BYTES: Final = 4
"""A frame is a big-endian uint32 length and that many bytes."""
WRITE_PIECE_BYTES: Final = 65_507
"""A stream is written in pieces that fill one Noise frame (65,519 bytes) with the 12 of the muxer's header, and a
piece is written whole or not at all: cancelling between pieces never tears a frame."""
MAX_NESTING: Final = 12
"""Levels of arrays and maps; our deepest message has 6."""
MAX_ARRAY: Final = 65_536
"""Elements of one array or map, before the models set tighter bounds."""

MAX_ITEMS: Final = 50_000
"""Values in one message, inner ones included: what a daemon may spend objects and milliseconds on."""
MAX_CARD_ITEMS: Final = 1 << 20
"""The same for a run card and a layout: some 12 values a tensor."""

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
CHILD_NOTES: Final = 4096
"""Notes to a call of a child that wait on one side of the pipe; a process that takes no more is stuck."""

# --- what a message may ask for --------------------------------------------------------------------------------------
MAX_GROUPS_PER_REQUEST: Final = 16
MAX_SAMPLES_PER_GROUP: Final = 256
MAX_PROMPT_TOKENS: Final = 32_768
MAX_NEW_TOKENS: Final = 32_768
MAX_VOCABULARY: Final = 1 << 20
MAX_STOP_TOKENS: Final = 32
SEGMENT_TOKENS: Final = 128
"""A completion may change its weights at multiples of this many tokens, so that nobody can choose where to."""
MAX_SEGMENTS: Final = 64
"""Of one completion."""
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
MIN_LEASE_S: Final = 1.0
"""A shorter order cannot be carried out by anybody."""
LOGPROB_SLACK: Final = 0.001
"""A log-probability may exceed zero by this much of rounding."""

# --- connections -----------------------------------------------------------------------------------------------------
MAX_CONNECTIONS: Final = 64
"""Low, because home routers fail with hundreds of connections."""
MAX_LEARNER_CONNECTIONS: Final = 2048
MAX_STREAMS_PER_PEER: Final = 32
"""Streams that one peer may hold open towards us at a time."""
MAX_REQUESTS_PER_S: Final = 20.0
"""Requests a second of one peer, averaged: a node with a fast GPU hands in some five results a second. Chunks are asked
for on streams that stay open."""
REQUEST_BURST: Final = 100
OWN_REQUESTS_PER_S: Final = 15.0
OWN_REQUEST_BURST: Final = 50
"""What a node allows itself of the two."""
MAX_FRAMES_PER_S: Final = 500.0
"""Small muxer frames a second that are read of one connection, averaged; a request takes six. What we send ourselves
earns more, so that a fast transfer is not held up."""
FRAMES_BURST: Final = 2000
REQUEST_BYTES_PER_S: Final = 2.0 * MIB
"""Bytes a second that are read of one connection's requests, averaged; the results of a GPU that samples 20,000 tokens
a second are a tenth of it. What a peer asked for itself does not count."""
REQUEST_BYTES_BURST: Final = 8 * MIB
"""The largest result comes in at once."""
MAX_BUFFERED_BYTES: Final = 5 * MIB
"""Unread bytes of one connection; the library's own yamux does not enforce its window."""
STREAM_WINDOW_BYTES: Final = 256 * KIB
"""What a peer may send on a fresh stream before we read; fixed by the yamux specification."""
BULK_WINDOW_BYTES: Final = 1 * MIB
"""The same for a stream that has carried a whole window: 10 MB/s over a path of 100 ms."""
MAX_BULK_STREAMS: Final = 3
"""Streams of one connection with the bulk window at a time: 3 MiB, and room for eight fresh streams, fit the buffer."""
MAX_CONNECTIONS_PER_PEER: Final = 2
"""One that was dialled from each side at the same moment; the oldest gives way to a third."""
RESERVED_CONNECTIONS: Final = 8
"""Slots that strangers cannot take, kept for our own dials."""
MAX_HANDSHAKES: Final = 64
"""Connections being negotiated at one time."""
HANDSHAKES_PER_BLOCK: Final = 8
"""Of these, from one address block."""
ARRIVALS_PER_BLOCK_S: Final = 2.0
"""New connections a second from one address block, averaged; a handshake costs us 2 ms of one core."""
ARRIVALS_BURST: Final = 64
ARRIVALS_S: Final = 20.0
"""New connections a second from everywhere, averaged, so that handshakes take a tenth of one core at most."""
ARRIVALS_BURST_IN_ALL: Final = 64
SLOW_HANDSHAKE_S: Final = 1.0
"""A handshake that takes longer makes room for a newcomer when all places are taken."""
MAX_BLOCKS: Final = 4096
"""Address blocks whose arrivals are remembered; the oldest are forgotten first."""
HANDSHAKE_BYTES: Final = 128 * KIB
"""What a stranger may send before the handshake is over; an honest one takes under 2 KiB."""
MAX_OFFENCES: Final = 20
"""Malformed streams or messages within ``OFFENCE_WINDOW_S`` after which a peer is shut out for ``BAN_S``."""
MAX_BANS: Final = 4096
"""Peers remembered as shut out; the oldest are forgotten first."""
MAX_HANDLERS: Final = 32
"""Requests that are worked on at one time; the rest wait, and peers take turns."""
MAX_HANDLERS_PER_PEER: Final = 8
REFUSAL_BYTES: Final = 8 * KIB
"""A code and a sentence of ``MAX_TEXT_CHARS``."""
RECEIVING_BYTES_PER_PEER: Final = 16 * MIB
"""Frames of one peer that have begun to arrive and are not complete: two results."""
RECEIVING_BYTES: Final = 192 * MIB
"""The same over all peers."""
RECEIVING_BYTES_FREE: Final = 256 * KIB
"""What every peer may have under way although that is used up: an ordinary result."""
GOSSIP_BUFFER: Final = 64
"""Gossip messages that wait for a subscriber; the oldest is dropped for a new one."""
MAX_TOPICS_PER_PEER: Final = 16
"""Gossip topics that one peer may subscribe to here."""
MAX_TOPIC_CHARS: Final = 256
MAX_CACHED_PEERS: Final = 64
"""Peers of the last run that are remembered."""
MAX_CACHED_ADDRESSES: Final = 4
"""Addresses remembered of one of them."""
MAX_CONNECTIONS_PER_BLOCK: Final = 32
"""Connections of one /24 (IPv4) or /48 (IPv6); loopback is not counted."""
SERVED_FILE_RATIO: Final = 1.5
"""Chunks served to one peer for one manifest, as a multiple of the whole payload."""
PASS_VERSIONS: Final = 10_000
"""Policy versions after which a pass that admits a node to other peers is refused."""

# --- time (seconds) --------------------------------------------------------------------------------------------------
DIAL_S: Final = 10.0
HANDSHAKE_S: Final = 8.0
"""Noise and muxer of an incoming connection."""
NEGOTIATE_S: Final = 8.0
"""Agreeing on the protocol of a new stream."""
PROBE_S: Final = 2.5
"""Silence of a connection after which it is probed."""
SILENT_S: Final = 7.0
"""Silence after which it is closed: a pulled cable or a stopped process is noticed within SILENT_S + PROBE_S."""
DOOR_S: Final = 8.0
"""A stream that was not looked at for so long is turned away; whoever opened it has given up, or soon will."""
WRITE_STALL_S: Final = 30.0
"""A stream whose reader grants no room for so long is reset; the library's 5 s would cut honest slow links."""
LINGER_S: Final = 3.0
"""How long a refused or finished request may go on arriving before its stream is reset."""
CLOSE_S: Final = 1.0
"""Saying goodbye on a connection that is being closed."""
OFFENCE_WINDOW_S: Final = 60.0
BAN_S: Final = 120.0
STEADY_S: Final = 30.0
"""A link that lived this long starts its back-off from the beginning when it is lost."""
REQUEST_S: Final = 20.0
"""One small request and its answer."""
TRANSFER_S: Final = 120.0
"""One large frame, such as a result or a run card."""
CHUNK_S: Final = 5.0
"""Least deadline of a chunk request; the larger of this and four times the median is used."""
FIRST_CHUNK_S: Final = 10.0
"""The same for the first chunks of a source whose pace nobody knows."""
LATE_PACES: Final = 3.0
SLOW_CHUNK_S: Final = 30.0
"""A source that is slow but steady is given LATE_PACES times what its queue takes at its own pace, and at most this."""
HEARTBEAT_S: Final = 3.0
DEAD_AFTER_S: Final = 15.0
"""Silence after which a node counts as gone and its leases are given to others."""
BACKOFF_FIRST_S: Final = 0.25
BACKOFF_MOST_S: Final = 30.0
STATUS_EVERY_S: Final = 1.0
"""A status is built at most this often."""
GOSSIP_PER_TOPIC_S: Final = 10
"""Gossip messages a second and topic that are looked at; the rest of a flood is dropped."""

# --- chunk swarm -----------------------------------------------------------------------------------------------------
NEIGHBOURS_WANTED: Final = 8
"""Neighbours that a node looks for by itself; those who dial it come on top, up to MAX_NEIGHBOURS."""
FIRST_WINDOW: Final = 2
"""Chunks asked of a new source at a time."""
PROMPT_S: Final = 0.05
PROMPT_BESTS: Final = 2.0
"""A chunk within either (the second in units of the source's shortest time) makes the window one larger ..."""
QUEUED_BESTS: Final = 4.0
"""... and one that took longer than this one smaller: more asks would only queue at the other side."""
MAX_WINDOW: Final = 8
MAX_WINDOW_BYTES: Final = 4 * MIB
"""The same in bytes: below MAX_BUFFERED_BYTES, so that what one source sends always finds room."""
LATE_MEDIANS: Final = 4.0
"""A chunk is late after CHUNK_S or so many times the median of the fetch, whichever is longer."""
MAX_STRIKES: Final = 2
STRIKE_FORGIVEN_AFTER: Final = 32
"""Chunks in time that make good for one strike: a long fetch must not add up the hiccups of hours."""
ENDGAME_S: Final = 0.5
"""When all that is missing has been asked for, a chunk out for longer than this may be asked of another source."""
REST_S: Final = 1.0
"""How long a source that said it is busy is left alone."""
PENALTY_FIRST_S: Final = 5.0
PENALTY_MOST_S: Final = 600.0
"""How long a neighbour that struck out is left alone; doubled every time."""
SHUN_S: Final = 3600.0
"""The same after a chunk with a wrong digest, which no honest peer sends."""
MAX_CONDUCT_PEERS: Final = 4096
"""Peers whose conduct, passes or served bytes are remembered; the oldest are forgotten."""
HAVE_EVERY_S: Final = 0.05
"""Least time between two updates on one have stream: at 8 neighbours some 160 small frames a second each way."""
HAVE_LAZY_S: Final = 2.0
"""For so long a peer may not hear of chunks that it holds itself: it only counts them."""
HAVE_BYTES_PER_S: Final = 64 * KIB
"""What updates of large bitmaps may take of a link: they come less often instead."""
HAVE_ALIVE_S: Final = 15.0
"""An update is sent at least this often, so that silence means that the other side is gone."""
HAVE_SILENCE_S: Final = 45.0
FIRST_OFFERS: Final = 8
"""Chunks that an origin offers to a peer at first; doubled whenever the peer has fetched half of them."""
MAX_OFFERS: Final = 256
"""64 MiB of 256 KiB chunks between two updates: the pace of a local network."""
SPARE_OFFERS: Final = 2
"""Chunks under way to others that a peer without anything else to ask for is offered as well."""
MAX_HAVE_STREAMS_PER_PEER: Final = 6
MAX_HAVE_STREAMS: Final = 4096
"""Some 64 KiB each at worst, and a few bytes for ordinary payloads."""
MAX_CHUNK_STREAMS_PER_PEER: Final = 12
"""Chunk streams stay open between requests; a source is asked for MAX_WINDOW chunks at a time."""
CHUNK_IDLE_S: Final = 30.0
"""A chunk stream without a request for this long is closed."""
UPLOAD_SLOTS: Final = 8
"""Chunks being sent at one time by a learner; by a node half as many. Few, so that each is soon whole and goes on."""
MAX_UPLOAD_QUEUE: Final = 512
UPLOAD_WAIT_S: Final = 2.0
"""A chunk request that found no slot for this long is told that we are busy: well before it would count as late."""
RETAINED_EDGES: Final = 16
"""Payloads that a node keeps after it has taken them, so that slower peers can have them from it."""
SERVED_WINDOW_S: Final = 3600.0
"""SERVED_FILE_RATIO holds for this long: a node that lost its disk gets the file again later."""

# --- disk ------------------------------------------------------------------------------------------------------------
DEFAULT_DISK_BYTES: Final = 100 * GIB
DEFAULT_DOWNLOAD_BYTES: Final = 100 * GIB
FREE_DISK_BYTES: Final = 512 * MIB
"""Room that is always left on a disk we write to."""
