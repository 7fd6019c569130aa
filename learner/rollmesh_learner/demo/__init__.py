"""``make demo``: a learner and nodes as separate processes on this machine, from an empty folder to a trained model.

It plays the people: it types the commands that an operator and volunteers type, reads the join line, looks at the
status, and waits. It takes no part in the run and knows the processes only from outside.
"""
