"""Streams whose chunks have several tokens."""
