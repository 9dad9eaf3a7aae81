"""Test-time regression: its figures."""
