"""What a server says of its steps."""
