"""The six choices, one file each, and `member`: what every member of a choice is made of."""
