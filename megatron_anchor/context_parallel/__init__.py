"""Context parallelism on paper: which rank holds what, and what that costs; numpy alone."""
