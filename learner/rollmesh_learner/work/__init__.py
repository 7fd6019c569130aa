"""The way of a rollout through the learner: prompts, leases, intake, rewards, and the book that orders them."""
