"""A py-libp2p host that strangers cannot take down: the only modules that know the library's internals.

Assembled from the library's parts, never with its ``new_host``. Each module mends what it names; each mend has a test
that fails without it. Nothing outside ``rollmesh_peer.mesh.host`` imports this package.

    transport     raw TCP with a budget before the handshake, Noise only, Ed25519 peers only
    yamux         streams with enforced windows, whole-frame writes, and probes of silent peers
    negotiation   which protocol a stream speaks, with a bound on every name
    swarm         who may connect; a stream's error ends the stream
    host          the table of protocols; no identify, no ping, no dialling on its own
    gossip        GossipSub behind a gate that looks at every RPC first
    services      the library's background tasks, none of which can end the host
    streams       the stream of the seam
    mesh          the peer made of these parts
"""
