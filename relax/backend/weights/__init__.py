"""Weights between Hugging Face files and this rank's parameters."""
