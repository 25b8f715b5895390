"""The decode step: propose, verify, commit."""
