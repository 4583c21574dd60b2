"""Stands before the standard library."""
