"""Who takes part: admission, what is known of each node, how it stands, and what follows an offence."""
