"""The method: the rule of acceptance and what it needs, in torch and NumPy."""
