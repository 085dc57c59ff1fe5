"""What ranks of a relaxed data axis do around a step."""
