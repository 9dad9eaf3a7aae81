"""MIRAS: language models, powers of bias and retention, and YAAD without its parts."""
