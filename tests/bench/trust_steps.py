"""Engines for `make bench-trust` whose weights are some optimiser steps away from those that the auditor has.

The steps are what a run takes: AdamW at 1e-5 on float32 masters, rounded to bf16 for the engine, here towards the right
answers of the sums, so that every step goes the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from rollmesh_peer.models.logprobs import completion_logprobs
from tests.bench import trust_data

if TYPE_CHECKING:
    from tests.bench.trust_cells import Cell
    from tests.bench.trust_data import CheatBackend, World

LR: Final = 1e-5
BATCH: Final = 8


def trained(world: World, cells: Sequence[Cell]) -> Iterator[tuple[Cell, CheatBackend]]:
    """One engine, handed out after as many steps as each cell's name asks for, fewest first."""
    engine = trust_data.make_engine(world, trust_data.Cell(name="steps", rollouts=0), kept={})
    parameters = [parameter for parameter in engine.model.parameters() if parameter.dtype == torch.bfloat16]
    masters = [parameter.detach().float() for parameter in parameters]
    optimiser = torch.optim.AdamW(masters, lr=LR, weight_decay=0.0, fused=True)
    student = trust_data.load_model(world.folder.config, layout=world.layout, image=world.image)
    learned = [parameter for parameter in student.parameters() if parameter.dtype == torch.bfloat16]
    done = 0
    for cell in sorted(cells, key=lambda cell: int(cell.cheat.removeprefix("step"))):
        for step in range(done, int(cell.cheat.removeprefix("step"))):
            _step(world, student, learned, masters, optimiser, number=step)
        done = int(cell.cheat.removeprefix("step"))
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master.to(torch.bfloat16))
        engine.repack()
        yield cell, engine


def _step(world, student, learned, masters, optimiser, *, number: int) -> None:
    items = [world.sums.item(100_000 + number * BATCH + place) for place in range(BATCH)]
    prompts = [np.asarray(world.text.prompt(world.sums.messages(item))[1], dtype=np.int64) for item in items]
    answers = [np.asarray(world.answer(item), dtype=np.int64) for item in items]
    for parameter in learned:
        parameter.requires_grad_(True)
        parameter.grad = None
    (-completion_logprobs(student, prompts, answers).mean()).backward()
    for parameter, master in zip(learned, masters, strict=True):
        master.grad = parameter.grad.float()
    torch.nn.utils.clip_grad_norm_(masters, 1.0)
    optimiser.step()
    with torch.no_grad():
        for parameter, master in zip(learned, masters, strict=True):
            parameter.requires_grad_(False)
            parameter.copy_(master.to(torch.bfloat16))
