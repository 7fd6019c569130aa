"""What outlives the process: the ledger, its rows, going back to a checkpoint, and the accounts of a run."""
