"""Begins with a base model that is already here, so that only the difference to the head has to be fetched.

The invariant: an image is adopted only if its root is the one that the run card names; anything else, from a missing
package to other bits out of a converter, is said in one line and leaves the run's own anchor as the way. What a learner
names is taken only from public places (an installed package, the hub), never as a path on this machine; a folder counts
when the volunteer names it. The conversion runs in a child process of one task, because it takes several times the
model's memory.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import trio

from rollmesh_node.own_limits import OwnLimits
from rollmesh_peer.children.launch import ChildSpec, kept_environment, python_argv
from rollmesh_peer.children.process import open_child
from rollmesh_peer.logging_setup import event
from rollmesh_peer.weights.durable import free_bytes
from rollmesh_peer.weights.keeper import Keeper
from rollmesh_protocol.errors import ChildFailed, RollmeshError
from rollmesh_protocol.layout import Layout
from rollmesh_protocol.messages import RunCard

IMPORT_S: Final = 4 * 3600.0
"""A large model over a home connection."""
IMAGE_S: Final = 1800.0
START_S: Final = 120.0
PUBLIC: Final = ("gguf:", "hub:")
"""How a source must begin that a learner may name."""
HUB_VARIABLES: Final = (
    "HF_HOME", "HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy", "SSL_CERT_FILE",
)  # fmt: skip
IMAGE: Final = "base.image"

_log = logging.getLogger(__name__)


async def adopt_base_model(
    keeper: Keeper,
    *,
    card: RunCard,
    chosen: str,
    cache: Path,
    folder: Path,
    own: OwnLimits,
    environ: Mapping[str, str],
) -> bool:
    """Give the keeper the run's base model if it can be had here; False, and nothing changed, if not.

    ``chosen`` is the volunteer's own source, or empty; ``cache`` keeps converted models; ``folder``, on the keeper's
    disk, holds the image for a moment.
    """
    source = chosen or (card.model.source if card.model.source.startswith(PUBLIC) else "")
    if not source:
        event(_log, "the run names no public base model; the weights come from the run", source=card.model.source)
        return False
    image = folder / IMAGE
    try:
        if await trio.to_thread.run_sync(free_bytes, folder) < card.layout.image_bytes:
            event(_log, "the disk has no room for the base model", level=logging.WARNING, folder=str(folder))
            return False
        await _import(source, image=image, card=card, cache=cache, own=own, environ=environ)
        await keeper.adopt_base(image, expected_root=card.model.base_root)
    except RollmeshError as error:
        event(
            _log, "the base model is not to be had here; the weights come from the run", level=logging.WARNING,
            source=source, why=error.detail,
        )  # fmt: skip
        return False
    finally:
        image.unlink(missing_ok=True)
    event(_log, "the base model is at hand", source=source)
    return True


async def _import(
    source: str, *, image: Path, card: RunCard, cache: Path, own: OwnLimits, environ: Mapping[str, str]
) -> None:
    """Write the image of ``source``; raises when it cannot be had or is another model."""
    hub = {name: environ[name] for name in HUB_VARIABLES if name in environ}
    spec = ChildSpec(
        name="base importer",
        argv=python_argv("rollmesh_peer.models.base"),
        environment=kept_environment(environ, hub),
        start_deadline_s=START_S,
    )
    async with open_child(spec) as child:
        body: dict[str, object] = {"source": source, "cache": str(cache), "max_bytes": own.download_bytes}
        answer = await child.call("import", body, deadline_s=IMPORT_S)
        folder, raw = answer.get("folder"), None
        if isinstance(folder, str):
            made = await child.call("image", {"folder": folder, "image": str(image)}, deadline_s=IMAGE_S)
            raw = made.get("layout")
    if not isinstance(raw, bytes):
        raise ChildFailed("the base importer answered without a layout")
    if Layout.decode(raw, limit=len(raw)).digest != card.layout.digest:
        raise ChildFailed("it has other tensors than the model of the run")
