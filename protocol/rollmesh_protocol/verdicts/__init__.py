"""What the figures of the learner's checks mean: pure decisions, which a node can take on its own work as well."""
