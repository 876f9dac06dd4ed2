"""The wait graph: who waits for what since when, what is likely at fault, and how a person gets to see it."""
