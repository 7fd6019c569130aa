"""A learner that attacks nodes."""
