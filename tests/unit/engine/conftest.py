"""One thread, and the tiny model of the model tests."""

from __future__ import annotations

import torch

from tests.unit.models.conftest import tiny

__all__ = ["tiny"]

torch.set_num_threads(1)
