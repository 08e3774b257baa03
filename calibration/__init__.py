"""Carrier statistics on synthetic tables, and the choice of tau per carrier."""
