"""The six choices, one package each, and `member`: the base of every member of a choice."""
