"""Requests of clients: each is served as it is meant, or refused before SGLang passes it on."""
