"""The framework of experiments: runs, costs, records, reports, and task models."""
