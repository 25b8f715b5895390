"""What a client may send: a request is served as it is meant, or refused before it is sent on."""
