"""What a volunteer may set of a node. Everything has a default: a node needs a join line and no file.

The limits here are the volunteer's word against the learner's: work and downloads beyond them are refused with a code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from rollmesh_peer.config import Located, Section, Unit, load
from rollmesh_peer.config.addresses import ListenAddress, PeerAddress
from rollmesh_protocol import limits

PREFIX: Final = "ROLLMESH_NODE"
"""Environment variables that override the file begin with this and two underscores."""


class Node(Section):
    """The node itself."""

    folder: Annotated[Path | None, Located()] = None
    """Where the node's key, known peers and weights lie; unset: node in the data folder."""
    name: Annotated[str, Field(max_length=64)] = ""
    """What the status shows beside the peer id; seen by everybody in the run."""
    role: Literal["worker", "seed"] = "worker"
    """What the node does for the run: a worker generates rollouts and passes weights on, a seed only passes them on."""


class Network(Section):
    """How the node reaches others and is reached."""

    listen: Annotated[tuple[ListenAddress, ...], Field(max_length=8)] = ("/ip4/0.0.0.0/tcp/0",)
    """Addresses that the node listens on for other nodes; port 0 takes a free one; an empty list dials only."""
    bootstrap: Annotated[tuple[PeerAddress, ...], Field(max_length=32)] = ()
    """More addresses of the learner and of peers, beside those of the join line and of the last run."""
    max_connections: Annotated[int, Unit("connections"), Field(ge=1, le=1024)] = limits.MAX_CONNECTIONS
    """Connections at one time; home routers fail with hundreds."""
    upload_mbit_s: Annotated[float, Unit("Mbit/s"), Field(ge=0, le=1e6)] = 0.0
    """What passing weights on may take of the uplink; 0 for no cap. Results never wait behind it."""
    learner_only: bool = False
    """Talk to the learner alone: other volunteers do not see this address, and weights come slower."""


class Engine(Section):
    """The child process that generates."""

    backend: Literal["auto", "vllm", "transformers", "scripted"] = "auto"
    """What generates; auto takes vLLM where it is installed and a GPU is fit; scripted has no model, for tests."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it computes; auto takes the GPU where there is one."""
    gpus: Annotated[tuple[Annotated[int, Field(ge=0, le=255)], ...], Field(max_length=64)] = ()
    """Numbers of the GPUs to use, as nvidia-smi shows them; empty: all. Each gets an engine, if the model fits it."""
    tensor_parallel: Annotated[int, Unit("GPUs"), Field(ge=0, le=64)] = 0
    """GPUs that share one copy of the model; 0: one, or as many as the model needs. More than one needs vLLM."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """The arithmetic; float32 is for CPUs without bfloat16."""
    threads: Annotated[int, Unit("threads"), Field(ge=0, le=1024)] = 0
    """Threads on a CPU; 0 leaves the choice to torch."""
    max_batch_samples: Annotated[int, Unit("rollouts"), Field(ge=1, le=4096)] = 64
    """Rollouts generated side by side; memory grows with it."""
    compile: bool = False
    """Let torch compile the model: minutes at the first start, then faster; vLLM decides for itself."""
    memory_gb: Annotated[float, Unit("GB"), Field(ge=0, le=1e5)] = 0.0
    """Memory of each device that the engine may take at most; 0: no bound but memory_share."""
    memory_share: Annotated[float, Unit("share"), Field(gt=0, le=1)] = 0.9
    """Share of each device's memory that the engine may take at most."""


class Limits(Section):
    """What the volunteer gives at most, whatever a learner asks for."""

    disk_gb: Annotated[float, Unit("GB"), Field(gt=0, le=1e6)] = limits.DEFAULT_DISK_BYTES / limits.GIB
    """Disk used by weights; the oldest unused files go first."""
    download_gb: Annotated[float, Unit("GB"), Field(gt=0, le=1e6)] = limits.DEFAULT_DOWNLOAD_BYTES / limits.GIB
    """The largest single download, a base model included."""
    prompt_tokens: Annotated[int, Unit("tokens"), Field(ge=1, le=limits.MAX_PROMPT_TOKENS)] = limits.MAX_PROMPT_TOKENS
    """The longest prompt that is taken."""
    completion_tokens: Annotated[int, Unit("tokens"), Field(ge=1, le=limits.MAX_NEW_TOKENS)] = limits.MAX_NEW_TOKENS
    """The longest completion that is generated."""
    groups_at_once: Annotated[int, Unit("groups"), Field(ge=1, le=limits.MAX_GROUPS_PER_REQUEST)] = 8
    """Groups that each engine holds at one time, a third of them waiting; more keep a fast GPU busy."""


class Weights(Section):
    """Where the weights come from and where the working copy lives."""

    base: Annotated[str, Located(unless=("hub:", "gguf:"))] = ""
    """The base model at hand: a folder, hub:<owner>/<name> or gguf:<package>; unset: what the run names."""

    ram_folder: Annotated[str, Located()] = "/dev/shm"  # noqa: S108 - a private folder is made in it
    """A folder in memory, which spares the disk; empty, or where memory is short, the node's folder is used."""


class Log(Section):
    """The node's log, on stderr."""

    format: Literal["text", "json"] = "text"
    """Lines for people, or one JSON object a line."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important lines that are written."""


class NodeConfig(Section):
    """A node's whole configuration."""

    node: Node = Node()
    """The node itself."""
    network: Network = Network()
    """How the node reaches others and is reached."""
    engine: Engine = Engine()
    """The child process that generates."""
    limits: Limits = Limits()
    """What the volunteer gives at most, whatever a learner asks for."""
    weights: Weights = Weights()
    """Where the weights come from and where the working copy lives."""
    log: Log = Log()
    """The node's log, on stderr."""


def load_config(path: Path | None, *, overrides: Sequence[str] = (), environ: Mapping[str, str]) -> NodeConfig:
    """The node's configuration from its file, ``ROLLMESH_NODE__...`` and ``--set``; UsageError says what is wrong."""
    return load(NodeConfig, path=path, overrides=overrides, environ=environ, prefix=PREFIX)
