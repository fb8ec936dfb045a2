"""A run: its parts, its steps, what it resumes from."""
