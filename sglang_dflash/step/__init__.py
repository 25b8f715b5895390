"""The decode step. It knows protocols, and no wing."""
