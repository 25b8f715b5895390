"""Chaos: clients, processes and files fail while a DFLASH server works. Nothing may be lost."""
