"""The heads that turn hidden states into drafted tokens."""
