"""The loop sentinel: measures how late the event loop is, and names what blocked it, from a thread outside of it."""
