"""What honest work looks like with this run's model: measured by the operator, kept in the run's folder.

    measure     the whole command: the model, the prompts, one cell after the other
    cells       rollouts of one cell by the node's engine, recomputed by the auditor
    derive      from their margins to thresholds
    record      calibration.json, and what a learner takes from it at its start
"""
