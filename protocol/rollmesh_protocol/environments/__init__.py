"""Environments: a prompt, and a reward that anyone can recompute from the prompt and the text of an answer.

    interface       Item, Environment: the whole contract
    parameters      reads an environment's parameters and refuses unknown ones with the nearest names
    addition        the example to copy
    reasoning_gym   106 procedural data sets of the reasoning-gym package
    registry        makes an environment by name

To write one, copy ``addition.py`` and name its ``make`` in the entry-point group ``rollmesh.environments``.
"""
