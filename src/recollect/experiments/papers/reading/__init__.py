"""Questions about long texts: needles, stories and documents, read by small language models."""
