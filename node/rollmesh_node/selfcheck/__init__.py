"""`rollmesh node selfcheck`: a node's own work under the learner's checks, and what is wrong with it in words."""
