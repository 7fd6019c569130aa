"""The base model of a run: imported by a child process of one task, because the conversion takes gigabytes.

A run remembers the folder that it began with, so that a learner which is started again does not wait for the import.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Final

from rollmesh_learner.config import Model
from rollmesh_learner.records import rows
from rollmesh_learner.records.ledger import Ledger, blob
from rollmesh_peer.children.process import ChildSpec, kept_environment, open_child, python_argv
from rollmesh_peer.folders import models_folder
from rollmesh_peer.models.folder import ModelFolder
from rollmesh_protocol.errors import ChildFailed, Refused, UsageError

_IMPORT_S: Final = 4 * 3600.0
"""A large model over a home connection."""
_HUB_VARIABLES: Final = ("HF_HOME", "HF_TOKEN", "HF_ENDPOINT", "HTTPS_PROXY", "https_proxy", "SSL_CERT_FILE")


async def base_of_run(ledger: Ledger, model: Model) -> ModelFolder:
    """The folder that the run began with, if the config still names the same source; else :func:`import_base`."""
    found = await ledger.fetch("SELECT value FROM meta WHERE name = 'base_folder'")
    if found:
        source, folder = json.loads(blob(found[0][0]))
        with contextlib.suppress(UsageError, Refused):  # it is gone from the cache, for instance
            if source == model.source:
                return ModelFolder.open(Path(folder))
    opened = await import_base(model)
    await ledger.commit(rows.put_meta("base_folder", json.dumps([model.source, str(opened.path)]).encode()))
    return opened


async def import_base(model: Model) -> ModelFolder:
    """The folder of the run's base model, made on first use.

    Raises:
        UsageError, HostError: the source does not exist, is none that we load, or cannot be fetched.
    """
    hub = {name: os.environ[name] for name in _HUB_VARIABLES if name in os.environ}
    spec = ChildSpec(
        name="base importer",
        argv=python_argv("rollmesh_peer.models.base"),
        environment=kept_environment(os.environ, hub),
        start_deadline_s=120.0,
    )
    cache = model.cache or models_folder()
    try:
        local = Path(model.source).expanduser()
        if not model.source.startswith(("gguf:", "hub:")) and not local.is_file():
            ModelFolder.open(local)  # what is wrong with a folder is said before a child has loaded its libraries
        async with open_child(spec) as child:
            answer = await child.call("import", {"source": model.source, "cache": str(cache)}, deadline_s=_IMPORT_S)
        folder = answer.get("folder")
        if not isinstance(folder, str):
            raise ChildFailed("the base importer answered without a folder")
        return ModelFolder.open(Path(folder))
    except Refused as error:  # its advice is for a node, which cannot choose the model
        raise UsageError(error.detail) from error
