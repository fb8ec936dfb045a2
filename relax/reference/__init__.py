"""The frozen reference as a table of numbers, and the pass that fills it."""
