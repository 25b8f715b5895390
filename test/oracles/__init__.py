"""What other implementations draft. Each script writes the fixture beside it."""
