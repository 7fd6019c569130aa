"""What honest work looks like with this run's model: measured by the operator, kept in the run's folder.

measure     honest rollouts by the node's engine, recomputed by the auditor, cell by cell
derive      from their margins to thresholds
record      calibration.json, and what a learner takes from it at its start
"""
