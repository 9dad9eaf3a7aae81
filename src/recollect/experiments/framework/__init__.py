"""What every experiment is made of: runs, prices, records, reports, and task models."""
