"""Seeing the mesh: asking a learner or a daemon of one's own for its status, and showing it."""
