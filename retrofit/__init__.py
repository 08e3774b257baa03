"""Hosts, variants, and the patching, saving and loading of a retrofit."""
